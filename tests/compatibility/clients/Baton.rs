// Rust's ureq: chat, a stream of events, a forced call and its result, structured output, and a
// stream that is left.

use serde_json::{json, Value};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

struct Fleet(String);

impl Fleet {
    fn post(&self, mut body: Value) -> ureq::Response {
        body["model"] = json!("demo_model");
        let url = format!("{}/v1/chat/completions", self.0);
        ureq::post(&url).send_json(body).expect("an answer")
    }

    fn message(&self, body: Value) -> Value {
        let mut answer: Value = self.post(body).into_json().expect("JSON");
        answer["choices"][0]["message"].take()
    }

    fn clients_gone(&self) -> f64 {
        let metrics = ureq::get(&format!("{}/metrics", self.0)).call().expect("metrics");
        let text = metrics.into_string().expect("text");
        let counts = text.lines().filter(|line| line.contains("status=\"499\"} "));
        counts.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

fn say(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn chat(fleet: &Fleet) {
    let body = json!({"messages": [say("What is a lambda?")], "max_tokens": 20});
    assert!(!fleet.message(body.clone())["content"].as_str().unwrap().is_empty());
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let lines = BufReader::new(fleet.post(streamed).into_reader()).lines();
    let events: Vec<String> = lines.map(Result::unwrap).filter(|line| !line.is_empty()).collect();
    assert!(events.len() > 2);
    assert_eq!(events.last().unwrap(), "data: [DONE]");
}

fn tools(fleet: &Fleet) {
    let schema = json!({
        "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": false});
    let mut body = json!({
        "messages": [say("The weather?")], "max_tokens": 200, "parallel_tool_calls": false,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}});
    let asked = fleet.message(body.clone());
    let call = &asked["tool_calls"][0];
    let text = call["function"]["arguments"].as_str().unwrap();
    let arguments: Value = serde_json::from_str(text).expect("arguments are JSON");
    assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
    let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "Sunny"});
    body["messages"] = json!([say("The weather?"), asked, result]);
    body["tool_choice"] = json!("none");
    assert!(fleet.message(body)["content"].is_string());
    let shape = json!({"name": "city", "schema": schema, "strict": true});
    let shaped = fleet.message(json!({
        "messages": [say("A city")], "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": shape}}));
    serde_json::from_str::<Value>(shaped["content"].as_str().unwrap()).expect("JSON");
}

fn abort(fleet: &Fleet) {
    let before = fleet.clients_gone();
    let body = json!({"messages": [say("Hi")], "min_tokens": 3000, "stream": true});
    let mut line = String::new();
    BufReader::new(fleet.post(body).into_reader()).read_line(&mut line).expect("a line");
    let deadline = Instant::now() + Duration::from_secs(5);
    while fleet.clients_gone() == before {
        assert!(Instant::now() < deadline, "the fleet did not notice that its client went away");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn main() {
    let fleet = Fleet(std::env::args().nth(1).expect("the fleet's address"));
    chat(&fleet);
    tools(&fleet);
    abort(&fleet);
}
