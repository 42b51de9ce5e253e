<?php
// Echo with PHP's streams and stream_select().
declare(strict_types=1);

const HOST = '127.0.0.1';
const PIECE = 65536;
const NUDGE = 1000;

set_error_handler(function (int $number, string $text): bool {
	// a select() that a signal interrupts is told as a warning
	fwrite(STDERR, "$text\n");
	exit(1);
});

final class End
{
	public string $got = '';
	public int $sent = 0;
	public bool $sending = true;
	public int $owed = 0; // of what was sent while the test wants to see it exchange a little

	public function __construct(public $stream, public string $data = '', public string $out = '')
	{
		stream_set_blocking($stream, false);
		stream_set_write_buffer($stream, 0);
		stream_set_read_buffer($stream, 0);
	}
}

/** @param array<int, End> $ends */
function wait_for(array $ends, $listener, callable $wants_read, callable $wants_write): array
{
	$readable = $writable = [];
	$none = null;
	foreach ($ends as $key => $end) {
		if ($wants_read($end)) {
			$readable[$key] = $end->stream;
		}
		if ($wants_write($end)) {
			$writable[$key] = $end->stream;
		}
	}
	if ($listener) {
		$readable['listener'] = $listener;
	}
	stream_select($readable, $writable, $none, null);
	return [$readable, $writable];
}

function serve(): void
{
	$context = stream_context_create(['socket' => ['backlog' => 128]]);
	$listener = stream_socket_server('tcp://' . HOST . ':0', $error, $text, STREAM_SERVER_BIND | STREAM_SERVER_LISTEN, $context);
	echo substr(strrchr(stream_socket_get_name($listener, false), ':'), 1), "\n";
	$ends = [];
	$wants_read = fn (End $end): bool => $end->sending && strlen($end->data) < PIECE;
	$wants_write = fn (End $end): bool => $end->data !== '';
	while (true) {
		[$readable, $writable] = wait_for($ends, $listener, $wants_read, $wants_write);
		if (isset($readable['listener'])) {
			unset($readable['listener']);
			$ends[] = new End(stream_socket_accept($listener));
		}
		foreach ($readable as $key => $stream) {
			$data = fread($stream, PIECE);
			$ends[$key]->data .= (string) $data;
			if (($data === '' || $data === false) && feof($stream)) {
				$ends[$key]->sending = false;
			}
		}
		foreach ($ends as $key => $end) {
			if ($end->data !== '' && (isset($writable[$key]) || isset($readable[$key]))) {
				$end->data = substr($end->data, (int) fwrite($end->stream, $end->data));
			}
			if (!$end->sending && $end->data === '') {
				stream_socket_shutdown($end->stream, STREAM_SHUT_WR);
				fclose($end->stream);
				unset($ends[$key]);
			}
		}
	}
}

function talk(string $port, int $connections, string $place): void
{
	$ends = [];
	for ($number = 0; $number < $connections; $number++) {
		$stream = stream_socket_client('tcp://' . HOST . ":$port");
		$ends[] = new End($stream, file_get_contents("$place/$number.in"), "$place/$number.out");
	}
	$wants_write = fn (End $end): bool => $end->sending && !$end->owed;
	while ($ends) {
		[$readable, $writable] = wait_for($ends, null, fn (End $end): bool => true, $wants_write);
		foreach ($writable as $key => $stream) {
			$end = $ends[$key];
			clearstatcache();
			if (file_exists("$place/wait")) {
				$end->owed = (int) fwrite($stream, str_repeat("\0", NUDGE));
				continue;
			}
			$end->sent += (int) fwrite($stream, substr($end->data, $end->sent, 100_000));
			if ($end->sent === strlen($end->data)) {
				stream_socket_shutdown($stream, STREAM_SHUT_WR);
				$end->sending = false;
			}
		}
		foreach ($readable as $key => $stream) {
			$end = $ends[$key];
			$data = fread($stream, PIECE);
			if ($end->owed) {
				$end->owed -= strlen((string) $data);
				continue;
			}
			$end->got .= (string) $data;
			if (($data === '' || $data === false) && feof($stream)) {
				file_put_contents($end->out, $end->got);
				fclose($stream);
				unset($ends[$key]);
			}
		}
	}
}

if ($argv[1] === 'server') {
	serve();
} else {
	talk($argv[2], (int) $argv[3], $argv[4]);
}
