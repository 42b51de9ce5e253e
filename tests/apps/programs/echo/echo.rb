# Echo with Ruby's threads, which wait in IO.
require "socket"

HOST = "127.0.0.1"
NUDGE = ("\0" * 1000).b.freeze
Thread.report_on_exception = true
Thread.abort_on_exception = true

if ARGV[0] == "server"
  listener = TCPServer.new(HOST, 0)
  listener.listen(128)
  $stdout.puts listener.addr[1]
  $stdout.flush
  loop do
    Thread.new(listener.accept) do |conn|
      begin
        loop { conn.write(conn.readpartial(16_384)) }
      rescue EOFError
        conn.close_write
        conn.close
      end
    end
  end
end

port, connections, place = ARGV[1..]
Array.new(connections.to_i) do |number|
  Thread.new do
    conn = TCPSocket.new(HOST, port)
    while File.exist?("#{place}/wait")
      conn.write(NUDGE)
      raise "wrong" unless conn.read(NUDGE.bytesize) == NUDGE
    end
    sender = Thread.new do
      conn.write(File.binread("#{place}/#{number}.in"))
      conn.close_write
    end
    File.binwrite("#{place}/#{number}.out", conn.read)
    sender.join
    conn.close
  end
end.each(&:join)
