// Downloads and uploads with java.net.http: a client a connection, which is kept.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;

public final class Web {
	private static byte[] ask(HttpClient client, HttpRequest.Builder request) throws Exception {
		var answer = client.send(request.build(), BodyHandlers.ofByteArray());
		if (answer.statusCode() >= 300)
			throw new IllegalStateException("status " + answer.statusCode());
		return answer.body();
	}

	private static void talk(String port, Path place, int number) throws Exception {
		HttpClient client = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
		String here = "http://127.0.0.1:" + port;
		URI up = URI.create(here + "/up/" + number);
		while (Files.exists(place.resolve("wait")))
			ask(client, HttpRequest.newBuilder(URI.create(here + "/nudge")));
		Files.write(place.resolve(number + ".out"), ask(client, HttpRequest.newBuilder(URI.create(here + "/large"))));
		ask(client, HttpRequest.newBuilder(up).PUT(BodyPublishers.ofFile(place.resolve(number + ".in"))));
		Files.write(place.resolve(number + ".back"), ask(client, HttpRequest.newBuilder(up)));
	}

	public static void main(String[] words) throws Exception {
		List<CompletableFuture<Void>> talks = new ArrayList<>();
		for (int n = 0; n < Integer.parseInt(words[2]); n++) {
			int number = n;
			CompletableFuture<Void> done = new CompletableFuture<>();
			talks.add(done);
			new Thread(() -> {
				try {
					talk(words[1], Path.of(words[3]), number);
					done.complete(null);
				} catch (Exception error) {
					done.completeExceptionally(error);
				}
			}).start();
		}
		for (CompletableFuture<Void> done : talks)
			done.join();
		System.exit(0); // without waiting for the clients' own threads
	}
}
