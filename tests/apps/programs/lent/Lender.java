import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;

/** Echoes, and starts a program for each line of its input: so many seconds does that sleep. */
public class Lender {
    private static void echo(Socket socket) {
        byte[] data = new byte[65536];
        try (socket) {
            for (int n; (n = socket.getInputStream().read(data)) > 0;) socket.getOutputStream().write(data, 0, n);
        } catch (IOException error) {
            System.out.println(error);
        }
    }

    public static void main(String[] arguments) throws Exception {
        ServerSocket listener = new ServerSocket(0, 16, InetAddress.getByName("127.0.0.1"));
        Thread accepts = new Thread(() -> {
            try {
                while (true) {
                    Socket socket = listener.accept();
                    Thread thread = new Thread(() -> echo(socket));
                    thread.setDaemon(true);
                    thread.start();
                }
            } catch (IOException error) {
                System.out.println(error);
            }
        });
        accepts.setDaemon(true);
        accepts.start();
        System.out.println(listener.getLocalPort());
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null;) {
            int status = new ProcessBuilder("sleep", line).start().waitFor();
            System.out.println("ended " + status);
        }
    }
}
