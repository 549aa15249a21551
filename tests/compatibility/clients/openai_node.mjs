// OpenAI's client for Node on both of its APIs: streams, tools in a loop, parsed answers, aborts.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: "none", maxRetries: 0 });
const model = MODEL;
const ask = [{ role: "user", content: "What is a lambda?" }];
const long = [{ role: "user", content: LONG }];
const City = z.object({ name: z.enum(["Rome", "Oslo"]), is_capital: z.boolean() });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

async function chat() {
  const answer = await client.chat.completions.create({ model, messages: ask, max_tokens: 20 });
  assert.ok(answer.choices[0].message.content);
  const stream = client.chat.completions.stream({
    model, messages: ask, max_tokens: 20, stream_options: { include_usage: true },
  });
  let text = "";
  stream.on("content", (delta) => { text += delta; });
  const whole = await stream.finalChatCompletion();
  assert.equal(whole.choices[0].message.content, text);
  assert.equal(whole.usage.completion_tokens, 20);
  const parsed = await client.chat.completions.parse({
    model, messages: ask, max_tokens: 200, response_format: zodResponseFormat(City, "city"),
  });
  assert.ok(City.parse(parsed.choices[0].message.parsed));
}

async function tools() {
  const calls = [];
  const weather = {
    name: "weather", description: "The weather", parameters: schema, parse: JSON.parse,
    function: ({ city }) => { calls.push(city); return "Sunny"; },
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({
      model, messages: ask, max_tokens: 200, stream,
      tools: [{ type: "function", function: weather }],
      tool_choice: { type: "function", function: { name: "weather" } },
    }, { maxChatCompletions: 2 });
    await runner.done();
    const roles = runner.messages.map((each) => each.role);
    assert.deepEqual(roles.slice(0, 3), ["user", "assistant", "tool"]);
  }
  assert.ok(calls.length >= 2 && calls.every((city) => ["Rome", "Oslo"].includes(city)), calls);
}

async function responses() {
  const answer = await client.responses.create({ model, input: "Hi", max_output_tokens: 20 });
  assert.ok(answer.output_text);
  const next = await client.responses.create({
    model, input: "And?", max_output_tokens: 20, previous_response_id: answer.id,
  });
  assert.ok(next.usage.input_tokens > answer.usage.input_tokens);
  const parsed = await client.responses.parse({
    model, input: "A city", max_output_tokens: 200, text: { format: zodTextFormat(City, "city") },
  });
  assert.ok(City.parse(parsed.output_parsed));
  const tool = { type: "function", name: "weather", parameters: schema, strict: true };
  const stream = client.responses.stream({
    model, input: ask, max_output_tokens: 200, tools: [tool], tool_choice: "required",
  });
  const { output } = await stream.finalResponse();
  const called = output.filter((each) => each.type === "function_call");
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(called[0].arguments).city));
  const results = called.map(({ call_id }) => (
    { type: "function_call_output", call_id, output: "Sunny" }));
  const last = await client.responses.create({
    model, input: [...ask, ...called, ...results], max_output_tokens: 20, tools: [tool],
  });
  assert.ok(["completed", "incomplete"].includes(last.status));
}

async function aborts() {
  await aborted(async () => {
    const stream = await client.chat.completions.create({ model, messages: long, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta.content) break;
  });
  await aborted(async () => {
    const stream = await client.responses.create({ model, input: LONG, stream: true });
    for await (const event of stream) if (event.type === "response.output_text.delta") break;
  });
  for (const padding of [0, 400_000]) {
    const leaving = new AbortController();
    const asked = client.chat.completions.create(
      { model, messages: long, min_tokens: 3000, padding: "x".repeat(padding) },
      { signal: leaving.signal });
    await aborted(async () => {
      setTimeout(() => leaving.abort(), 100);
      await assert.rejects(asked, OpenAI.APIUserAbortError);
    });
  }
}

async function others() {
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  assert.deepEqual(models, [model]);
  const text = await client.completions.create({ model, prompt: "def f(", max_tokens: 8, n: 2 });
  assert.equal(text.choices.length, 2);
  const tooLong = [{ role: "user", content: "word ".repeat(9000) }];
  await assert.rejects(client.chat.completions.create({ model, messages: tooLong }), {
    status: 400, code: "context_length_exceeded" });
}

await chat();
await tools();
await responses();
await aborts();
await others();
