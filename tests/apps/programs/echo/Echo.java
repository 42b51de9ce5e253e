// Echo with Java NIO: one thread and a selector at either end.

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;

public final class Echo {
	private static final String HOST = "127.0.0.1";
	private static final int NUDGE = 1000;

	/** One end of a connection. */
	private interface End {
		/** Whether it has ended. */
		boolean handle(SelectionKey key, SocketChannel channel) throws IOException;
	}

	private static final class Server implements End {
		private final ByteBuffer held = ByteBuffer.allocateDirect(65536);
		private boolean ended;

		@Override
		public boolean handle(SelectionKey key, SocketChannel channel) throws IOException {
			if (!ended && held.hasRemaining())
				ended = channel.read(held) < 0;
			held.flip();
			channel.write(held);
			held.compact();
			if (ended && held.position() == 0) {
				channel.shutdownOutput();
				channel.close();
				return true;
			}
			int wanted = held.position() > 0 ? SelectionKey.OP_WRITE : 0;
			key.interestOps(!ended && held.hasRemaining() ? wanted | SelectionKey.OP_READ : wanted);
			return false;
		}
	}

	private static final class Client implements End {
		private final ByteBuffer unsent;
		private final Path wait;
		private int owed; // of what was sent while the test wants to see it exchange a little
		private final ByteBuffer piece = ByteBuffer.allocateDirect(65536);
		private final ByteArrayOutputStream got = new ByteArrayOutputStream();
		private final Path out;

		Client(Path place, int number) throws IOException {
			unsent = ByteBuffer.wrap(Files.readAllBytes(place.resolve(number + ".in")));
			out = place.resolve(number + ".out");
			wait = place.resolve("wait");
		}

		@Override
		public boolean handle(SelectionKey key, SocketChannel channel) throws IOException {
			if (key.isConnectable()) {
				channel.finishConnect();
				go(key, channel);
				return false;
			}
			if (key.isWritable()) {
				channel.write(unsent);
				if (!unsent.hasRemaining()) {
					channel.shutdownOutput();
					key.interestOps(SelectionKey.OP_READ);
				}
			}
			if (!key.isReadable())
				return false;
			int count = channel.read(piece.clear());
			if (count < 0) {
				Files.write(out, got.toByteArray());
				channel.close();
				return true;
			}
			if (owed > 0) {
				owed -= count;
				if (owed == 0)
					go(key, channel);
				return false;
			}
			byte[] data = new byte[count];
			piece.flip().get(data);
			got.write(data, 0, count);
			return false;
		}

		private void go(SelectionKey key, SocketChannel channel) throws IOException {
			if (Files.exists(wait)) {
				owed = channel.write(ByteBuffer.allocate(NUDGE));
				key.interestOps(SelectionKey.OP_READ);
			} else
				key.interestOps(SelectionKey.OP_READ | SelectionKey.OP_WRITE);
		}
	}

	public static void main(String[] words) throws IOException {
		Selector selector = Selector.open();
		int left = 0;
		if (words[0].equals("server")) {
			ServerSocketChannel listener = ServerSocketChannel.open().bind(new InetSocketAddress(HOST, 0), 128);
			listener.configureBlocking(false);
			listener.register(selector, SelectionKey.OP_ACCEPT);
			System.out.println(listener.socket().getLocalPort());
			left = Integer.MAX_VALUE;
		} else {
			for (; left < Integer.parseInt(words[2]); left++) {
				SocketChannel channel = SocketChannel.open();
				channel.configureBlocking(false);
				channel.connect(new InetSocketAddress(HOST, Integer.parseInt(words[1])));
				channel.register(selector, SelectionKey.OP_CONNECT, new Client(Path.of(words[3]), left));
			}
		}
		while (left > 0) {
			selector.select();
			for (Iterator<SelectionKey> keys = selector.selectedKeys().iterator(); keys.hasNext(); keys.remove()) {
				SelectionKey key = keys.next();
				if (key.isAcceptable()) {
					SocketChannel channel = ((ServerSocketChannel) key.channel()).accept();
					channel.configureBlocking(false);
					channel.register(selector, SelectionKey.OP_READ, new Server());
				} else if (((End) key.attachment()).handle(key, (SocketChannel) key.channel()))
					left--;
			}
		}
	}
}
