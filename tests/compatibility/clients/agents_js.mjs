// OpenAI's Agents SDK for JavaScript on both of OpenAI's APIs: sessions, tools, handoffs between
// agents, structured output, streams, `previousResponseId`, aborts.

import assert from "node:assert/strict";
import {
  Agent, MemorySession, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled,
  tool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: V1, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.enum(["Rome", "Oslo"]), is_capital: z.boolean() });
const settings = { maxTokens: 300, parallelToolCalls: false };

function weather(calls) {
  return tool({
    name: "weather",
    description: "The weather",
    parameters: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async ({ city }) => { calls.push(city); return `Sunny in ${city}`; },
  });
}

async function chat(model) {
  const agent = new Agent({
    name: "short", instructions: "Be short", model, outputType: City, modelSettings: settings });
  const session = new MemorySession();
  const counts = [];
  for (const question of ["What is a lambda?", "And a closure?", "And a class?"]) {
    const result = await run(agent, question, { session });
    assert.ok(City.parse(result.finalOutput));
    counts.push(result.rawResponses.at(-1).usage.inputTokens);
  }
  assert.ok(counts[0] < counts[1] && counts[1] < counts[2], `${counts}`);
  const streamed = await run(agent, "What is a lambda?", { stream: true });
  let text = "";
  for await (const delta of streamed.toTextStream()) text += delta;
  assert.deepEqual(City.parse(JSON.parse(text)), streamed.finalOutput);
}

async function tools(model) {
  for (const stream of [false, true]) {
    const calls = [];
    const agent = new Agent({
      name: "forecaster", instructions: "Call the tool", model, tools: [weather(calls)],
      modelSettings: { ...settings, toolChoice: "required" },
    });
    const result = await run(agent, "The weather in Rome?", { stream });
    if (stream) await result.completed;
    assert.equal(calls.length, 1); // then the choice is reset, and the model answers
    assert.ok(result.newItems.some((item) => item.type === "tool_call_output_item"));
    assert.equal(result.rawResponses.length, 2);
  }
}

async function handoffs(model) {
  const poet = new Agent({ name: "poet", model, outputType: City, modelSettings: settings });
  const triage = new Agent({
    name: "triage", instructions: "Hand over", model, handoffs: [poet], outputType: City,
    modelSettings: { ...settings, toolChoice: "required" },
  });
  const result = await run(triage, "A poem");
  assert.ok(City.parse(result.finalOutput));
  assert.equal(result.lastAgent.name, "poet");
}

async function remembered(model) {
  const agent = new Agent({ name: "short", model, outputType: City, modelSettings: settings });
  const first = await run(agent, "What is a lambda?");
  const next = await run(agent, "And?", { previousResponseId: first.lastResponseId });
  const tokens = [first, next].map((result) => result.rawResponses[0].usage.inputTokens);
  assert.ok(tokens[0] < tokens[1]);
}

async function aborts(model) {
  const leaving = new AbortController();
  const agent = new Agent({ name: "long", model });
  await aborted(async () => {
    const result = await run(agent, LONG, { stream: true, signal: leaving.signal });
    for await (const delta of result.toTextStream()) if (delta) leaving.abort();
  });
}

for (const kind of [OpenAIChatCompletionsModel, OpenAIResponsesModel]) {
  const model = new kind(client, MODEL);
  const steps = [chat, tools, handoffs, aborts];
  if (kind === OpenAIResponsesModel) steps.push(remembered);
  for (const step of steps) {
    await step(model).catch((error) => {
      throw new Error(`${kind.name}, ${step.name}`, { cause: error });
    });
  }
}
