# Echo with Tcl's event loop: fcopy in the server, file events in the client.

set host 127.0.0.1
set nudge 1000
proc bgerror {text} {
    puts stderr "$text\n$::errorInfo"
    exit 1
}

proc copied {conn count {trouble ""}} {
    if {$trouble ne ""} {
        error "fcopy: $trouble"
    }
    close $conn write
    close $conn
}

proc accepted {conn from port} {
    fconfigure $conn -translation binary -blocking 0
    fcopy $conn $conn -command [list copied $conn]
}

proc came {conn number} {
    if {$::owed($number)} {
        # of what was sent while the test wants to see it exchange a little
        incr ::owed($number) -[string length [read $conn $::owed($number)]]
        if {!$::owed($number)} {
            fileevent $conn writable [list go $conn $number]
        }
        return
    }
    append ::got($number) [read $conn 65536]
    if {![eof $conn]} {
        return
    }
    set out [open $::place/$number.out wb]
    puts -nonewline $out $::got($number)
    close $out
    close $conn
    incr ::left -1
}

proc go {conn number} {
    if {[file exists $::place/wait]} {
        fileevent $conn writable {}
        set ::owed($number) $::nudge
        puts -nonewline $conn [string repeat \0 $::nudge]
        flush $conn
        return
    }
    # one piece a turn: what puts cannot write it would hold without a bound
    set piece [string range $::data($number) $::sent($number) [expr {$::sent($number) + 65535}]]
    puts -nonewline $conn $piece
    flush $conn
    incr ::sent($number) [string length $piece]
    if {$::sent($number) == [string length $::data($number)]} {
        fileevent $conn writable {}
        close $conn write
    }
}

if {[lindex $argv 0] eq "server"} {
    set listener [socket -server accepted -myaddr $host 0]
    puts [lindex [fconfigure $listener -sockname] 2]
    flush stdout
    vwait forever
}

lassign $argv what port left place
set count $left
for {set number 0} {$number < $count} {incr number} {
    set in [open $place/$number.in rb]
    set data($number) [read $in]
    close $in
    set got($number) ""
    set sent($number) 0
    set owed($number) 0
    set conn [socket $host $port]
    fconfigure $conn -translation binary -blocking 0
    fileevent $conn readable [list came $conn $number]
    fileevent $conn writable [list go $conn $number]
}
while {$left > 0} {
    vwait left
}
