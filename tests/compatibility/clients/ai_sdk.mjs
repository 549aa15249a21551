// Vercel's AI SDK with four providers: the compatible one, OpenAI's chat and its default, which
// speaks Responses, and Anthropic's. Each generates, streams, runs a tool in several steps, makes
// an object, and aborts.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const common = { baseURL: V1, apiKey: "none" };
const compatible = createOpenAICompatible({
  ...common, name: "baton", supportsStructuredOutputs: true, includeUsage: true });
const MODELS = {
  compatible: compatible(MODEL),
  chat: createOpenAI(common).chat(MODEL),
  responses: createOpenAI(common)(MODEL),
  anthropic: createAnthropic(common)(MODEL),
};
const ONE_CALL = {
  baton: { parallel_tool_calls: false },
  openai: { parallelToolCalls: false },
  anthropic: { disableParallelToolUse: true },
};
const City = z.object({ name: z.enum(["Rome", "Oslo"]), is_capital: z.boolean() });

async function text(base) {
  const first = await generateText({ ...base, prompt: "What is a lambda?", maxOutputTokens: 20 });
  assert.ok(first.text);
  assert.equal(first.usage.outputTokens, 20);
  const messages = [
    { role: "user", content: "What is a lambda?" }, ...first.response.messages,
    { role: "user", content: "And a closure?" }];
  const streamed = streamText({ ...base, messages, maxOutputTokens: 20 });
  let whole = "";
  for await (const delta of streamed.textStream) whole += delta;
  assert.ok(whole);
  assert.equal((await streamed.usage).outputTokens, 20);
}

async function tools(base) {
  const calls = [];
  const weather = tool({
    description: "The weather",
    inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
    execute: async ({ city }) => { calls.push(city); return `Sunny in ${city}`; },
  });
  const settings = {
    ...base, prompt: "The weather in Rome?", tools: { weather }, maxOutputTokens: 300,
    stopWhen: stepCountIs(3), prepareStep: ({ stepNumber }) => (
      { toolChoice: stepNumber < 2 ? "required" : "none" }),
  };
  const done = await generateText(settings);
  assert.deepEqual(done.steps.map((step) => step.toolResults.length > 0), [true, true, false]);
  const streamed = streamText(settings);
  await streamed.consumeStream({ onError: (error) => { throw error; } });
  assert.equal((await streamed.steps).length, 3);
  assert.ok(calls.length >= 4, `${calls.length} calls`);
}

async function objects(base) {
  const output = Output.object({ schema: City });
  const asked = { ...base, prompt: "Name a city", maxOutputTokens: 300, output };
  assert.ok(City.parse((await generateText(asked)).output));
  const streamed = streamText(asked);
  await streamed.consumeStream();
  assert.ok(City.parse(await streamed.output));
}

async function aborts(base) {
  for (const isStreamed of [true, false]) {
    const leaving = new AbortController();
    const asked = { ...base, prompt: LONG, maxOutputTokens: 3000, abortSignal: leaving.signal };
    await aborted(async () => {
      if (isStreamed) {
        for await (const delta of streamText(asked).textStream) if (delta) leaving.abort();
      } else {
        setTimeout(() => leaving.abort(), 100);
        await assert.rejects(generateText(asked), { name: "AbortError" });
      }
    });
  }
}

for (const [name, model] of Object.entries(MODELS)) {
  const base = { model, maxRetries: 0, providerOptions: ONE_CALL };
  for (const step of [text, tools, objects, aborts]) {
    await step(base).catch((error) => {
      throw new Error(`${name}, ${step.name}`, { cause: error });
    });
  }
}
