// Anthropic's client for JavaScript: messages, streams, the tool runner, parsed answers, aborts.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { FLEET, LONG, MODEL, aborted } from "./baton_fleet.mjs";

const client = new Anthropic({ baseURL: FLEET, apiKey: "none", maxRetries: 0 });
const model = MODEL;
const messages = [{ role: "user", content: "What is a lambda?" }];

async function chat() {
  const answer = await client.messages.create({ model, max_tokens: 20, messages });
  assert.ok(answer.content[0].text);
  assert.equal(answer.usage.output_tokens, 20);
  let text = "";
  const stream = client.messages.stream({ model, max_tokens: 20, messages });
  stream.on("text", (delta) => { text += delta; });
  assert.equal((await stream.finalMessage()).content[0].text, text);
  const City = z.object({ name: z.enum(["Rome", "Oslo"]), is_capital: z.boolean() });
  const parsed = await client.messages.parse({
    model, max_tokens: 200, messages, output_config: { format: zodOutputFormat(City) },
  });
  assert.ok(City.parse(parsed.parsed_output));
  const counted = await client.messages.countTokens({ model, messages });
  assert.equal(counted.input_tokens, answer.usage.input_tokens);
}

async function tools() {
  for (const stream of [false, true]) {
    const calls = [];
    const weather = betaZodTool({
      name: "weather",
      description: "The weather",
      inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
      run: ({ city }) => { calls.push(city); return [{ type: "text", text: `Sunny in ${city}` }]; },
    });
    const runner = client.beta.messages.toolRunner({
      model, max_tokens: 200, messages, stream, tools: [weather], max_iterations: 2,
      tool_choice: { type: "any", disable_parallel_tool_use: true },
      system: [{ type: "text", text: "Be short." }, { type: "text", text: "Now." }],
    });
    for await (const turn of runner) if (stream) await turn.finalMessage();
    assert.ok(calls.length >= 1, "the tool was called");
    assert.ok(runner.params.messages.length >= 3);
  }
}

async function aborts() {
  await aborted(async () => {
    const ask = [{ role: "user", content: LONG }];
    const stream = await client.messages.create({
      model, max_tokens: 3000, messages: ask, stream: true });
    for await (const event of stream) if (event.type === "content_block_delta") break;
  });
  await aborted(async () => {
    const leaving = new AbortController();
    const ask = [{ role: "user", content: LONG }];
    const asked = client.messages.create(
      { model, max_tokens: 3000, messages: ask }, { signal: leaving.signal });
    setTimeout(() => leaving.abort(), 100);
    await assert.rejects(asked, Anthropic.APIUserAbortError);
  });
}

async function others() {
  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  assert.deepEqual(models, [model]);
  const tooLong = [{ role: "user", content: "word ".repeat(9000) }];
  await assert.rejects(client.messages.create({ model, max_tokens: 20, messages: tooLong }), {
    status: 400, message: /prompt is too long/ });
}

await chat();
await tools();
await aborts();
await others();
