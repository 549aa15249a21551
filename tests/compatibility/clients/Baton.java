import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.stream.Collectors;

/** Java's HttpClient, which asks for h2c with its first request, unless it is told not to. */
public class Baton {
    public static void main(String[] args) throws Exception {
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).build();
            for (boolean streamed : new boolean[] {false, true, false}) {
                String body = "{\"model\": \"demo_model\", \"max_tokens\": 16, \"stream\": "
                    + streamed + ", \"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}";
                HttpRequest request = HttpRequest.newBuilder()
                    .uri(URI.create(args[0] + "/v1/chat/completions"))
                    .header("content-type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString(body))
                    .build();
                HttpResponse<java.util.stream.Stream<String>> answer =
                    client.send(request, HttpResponse.BodyHandlers.ofLines());
                String text = answer.body().collect(Collectors.joining("\n"));
                if (answer.statusCode() != 200 || !text.contains("choices")) {
                    throw new AssertionError(version + ": " + answer.statusCode() + " " + text);
                }
                if (streamed && !text.endsWith("data: [DONE]\n")) {
                    throw new AssertionError("the stream ends with " + text);
                }
            }
            HttpRequest head = HttpRequest.newBuilder(URI.create(args[0] + "/v1/models"))
                .method("HEAD", HttpRequest.BodyPublishers.noBody()).build();
            int status = client.send(head, HttpResponse.BodyHandlers.discarding()).statusCode();
            if (status != 200) {
                throw new AssertionError("HEAD: " + status);
            }
        }
    }
}
