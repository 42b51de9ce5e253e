# Echo with Perl: a process a connection in the server, select() over all of them in the client.
use strict;
use warnings;
use IO::Select;
use IO::Socket::INET;

my $host = "127.0.0.1";
my $nudge = "\0" x 1000;
my ($what, $port, $connections, $place) = @ARGV;

sub echo {
	my ($conn) = @_;
	while (1) {
		my $count = sysread($conn, my $data, 16384);
		die "sysread: $!" unless defined $count;
		last unless $count;
		for (my $sent = 0; $sent < $count;) {
			my $more = syswrite($conn, $data, $count - $sent, $sent);
			die "syswrite: $!" unless defined $more;
			$sent += $more;
		}
	}
	shutdown($conn, 1) or die "shutdown: $!";
	close $conn;
}

if ($what eq "server") {
	$SIG{CHLD} = "IGNORE";
	my $listener = IO::Socket::INET->new(LocalAddr => $host, LocalPort => 0, Listen => 128) or die "listen: $@";
	$| = 1;
	print $listener->sockport, "\n";
	while (1) {
		my $conn = $listener->accept or next;
		my $pid = fork;
		die "fork: $!" unless defined $pid;
		if ($pid == 0) {
			close $listener;
			echo($conn);
			exit 0;
		}
		close $conn;
	}
}

my ($readers, $writers, %state) = (IO::Select->new, IO::Select->new);
for my $number (0 .. $connections - 1) {
	my $conn = IO::Socket::INET->new(PeerAddr => $host, PeerPort => $port) or die "connect: $@";
	$conn->blocking(0);
	open my $in, "<:raw", "$place/$number.in" or die "$number.in: $!";
	local $/;
	# owed: of what was sent while the test wants to see it exchange a little
	$state{$conn} = { number => $number, data => <$in>, sent => 0, got => "", owed => 0 };
	$readers->add($conn);
	$writers->add($conn);
}
while ($readers->count) {
	my ($readable, $writable) = IO::Select->select($readers, $writers);
	for my $conn (@$writable) {
		my $one = $state{$conn};
		if (-e "$place/wait") {
			$one->{owed} = syswrite($conn, $nudge) // die "syswrite: $!";
			$writers->remove($conn);
			next;
		}
		my $count = syswrite($conn, $one->{data}, 100_000, $one->{sent});
		die "syswrite: $!" unless defined $count or $!{EAGAIN};
		$one->{sent} += $count // 0;
		if ($one->{sent} == length $one->{data}) {
			shutdown($conn, 1) or die "shutdown: $!";
			$writers->remove($conn);
		}
	}
	for my $conn (@$readable) {
		my $one = $state{$conn};
		my $count = sysread($conn, $one->{got}, 65536, length $one->{got});
		next if !defined $count and $!{EAGAIN};
		die "sysread: $!" unless defined $count;
		if ($one->{owed}) {
			$one->{owed} -= $count || die "an early end";
			$one->{got} = "";
			$writers->add($conn) unless $one->{owed};
			next;
		}
		next if $count;
		open my $out, ">:raw", "$place/$one->{number}.out" or die "$one->{number}.out: $!";
		print $out $one->{got};
		close $out or die "$one->{number}.out: $!";
		$readers->remove($conn);
		$writers->remove($conn);
		close $conn;
	}
}
