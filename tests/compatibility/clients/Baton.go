// Go's net/http: chat, a stream of events, a forced call and its result, structured output, aborts by
// a context, HTTP/1.1 and its connections kept.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

type object = map[string]any

var fleet = os.Args[1]

func check(condition bool, format string, values ...any) {
	if !condition {
		panic(fmt.Sprintf(format, values...))
	}
}

func post(ctx context.Context, path string, body object) (*http.Response, error) {
	body["model"] = "demo_model"
	text, err := json.Marshal(body)
	check(err == nil, "%v", err)
	request, err := http.NewRequestWithContext(ctx, "POST", fleet+path, bytes.NewReader(text))
	check(err == nil, "%v", err)
	request.Header.Set("Content-Type", "application/json")
	return http.DefaultClient.Do(request)
}

func ask(path string, body object) object {
	answer, err := post(context.Background(), path, body)
	check(err == nil, "%v", err)
	defer answer.Body.Close()
	var found object
	check(json.NewDecoder(answer.Body).Decode(&found) == nil, "no JSON: %s", answer.Status)
	check(answer.StatusCode == 200, "%s: %v", answer.Status, found)
	return found
}

func message(answer object) object {
	return answer["choices"].([]any)[0].(object)["message"].(object)
}

func say(text string) object {
	return object{"role": "user", "content": text}
}

func chat() {
	body := object{"messages": []any{say("What is a lambda?")}, "max_tokens": 20}
	check(message(ask("/v1/chat/completions", body))["content"] != "", "no text")
	body["stream"] = true
	answer, err := post(context.Background(), "/v1/chat/completions", body)
	check(err == nil, "%v", err)
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	last := ""
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data: ") {
			last = strings.TrimPrefix(lines.Text(), "data: ")
		}
	}
	check(lines.Err() == nil && last == "[DONE]", "the stream ends with %s, %v", last, lines.Err())
}

func tools() {
	city := object{"type": "string", "enum": []string{"Rome", "Oslo"}}
	schema := object{
		"type": "object", "properties": object{"city": city}, "required": []string{"city"},
		"additionalProperties": false}
	function := object{"name": "weather", "parameters": schema}
	body := object{
		"messages": []any{say("The weather?")}, "max_tokens": 200, "parallel_tool_calls": false,
		"tools":       []any{object{"type": "function", "function": function}},
		"tool_choice": object{"type": "function", "function": object{"name": "weather"}},
	}
	asked := message(ask("/v1/chat/completions", body))
	call := asked["tool_calls"].([]any)[0].(object)
	var arguments struct{ City string }
	text := call["function"].(object)["arguments"].(string)
	check(json.Unmarshal([]byte(text), &arguments) == nil, "arguments: %s", text)
	check(arguments.City == "Rome" || arguments.City == "Oslo", "arguments: %s", text)
	result := object{"role": "tool", "tool_call_id": call["id"], "content": "Sunny"}
	body["messages"] = []any{say("The weather?"), asked, result}
	body["tool_choice"] = "none"
	check(message(ask("/v1/chat/completions", body))["content"] != nil, "no text after a result")
	shape := object{"name": "city", "schema": schema, "strict": true}
	shaped := object{
		"messages": []any{say("A city")}, "max_tokens": 200,
		"response_format": object{"type": "json_schema", "json_schema": shape}}
	text = message(ask("/v1/chat/completions", shaped))["content"].(string)
	check(json.Unmarshal([]byte(text), &arguments) == nil, "structured output: %s", text)
}

func aborts() {
	for _, stream := range []bool{true, false} {
		before := numClientsGone()
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		body := object{"messages": []any{say("Hi")}, "min_tokens": 3000, "stream": stream}
		answer, err := post(ctx, "/v1/chat/completions", body)
		if err == nil {
			lines := bufio.NewScanner(answer.Body)
			for lines.Scan() {
			}
			err = lines.Err()
		}
		check(err != nil, "the answer came too early")
		cancel()
		for deadline := time.Now().Add(5 * time.Second); numClientsGone() == before; {
			check(time.Now().Before(deadline), "the fleet did not notice that its client went away")
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func numClientsGone() int {
	answer, err := http.Get(fleet + "/metrics")
	check(err == nil, "%v", err)
	defer answer.Body.Close()
	lines, count := bufio.NewScanner(answer.Body), 0
	for lines.Scan() {
		if strings.Contains(lines.Text(), `status="499"} `) {
			var value float64
			fmt.Sscan(lines.Text()[strings.LastIndex(lines.Text(), " "):], &value)
			count += int(value)
		}
	}
	return count
}

func main() {
	chat()
	tools()
	aborts()
}
