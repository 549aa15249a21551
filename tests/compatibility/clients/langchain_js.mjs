// LangChain for JavaScript on both of OpenAI's APIs: chat, streams, a tool loop by hand and by an
// agent, structured output by schema and by function, aborts.

import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, createMiddleware, providerStrategy } from "langchain";
import { z } from "zod";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

const City = z.object({ name: z.enum(["Rome", "Oslo"]), is_capital: z.boolean() });
const weather = tool(async ({ city }) => `Sunny in ${city}`, {
  name: "weather",
  description: "The weather",
  schema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
});

function makeModel(useResponsesApi, maxTokens) {
  return new ChatOpenAI({
    model: MODEL, apiKey: "none", maxTokens, useResponsesApi, maxRetries: 0,
    configuration: { baseURL: V1 } });
}

async function chat(useResponsesApi) {
  const model = makeModel(useResponsesApi, 20);
  const answer = await model.invoke("What is a lambda?");
  assert.ok(answer.text);
  assert.equal(answer.usage_metadata.output_tokens, 20);
  let whole;
  for await (const chunk of await model.stream("What is a lambda?")) {
    whole = whole === undefined ? chunk : whole.concat(chunk);
  }
  assert.ok(whole.text);
  assert.equal(whole.usage_metadata.output_tokens, 20);
  const history = [new HumanMessage("What is a lambda?"), whole, new HumanMessage("And?")];
  assert.ok((await model.invoke(history)).text);
}

async function tools(useResponsesApi) {
  const model = makeModel(useResponsesApi, 100);
  const forced = model.bindTools([weather], { // over Responses, the client drops "required"
    tool_choice: "weather", parallel_tool_calls: false });
  for (const isStreamed of [false, true]) {
    const history = [new HumanMessage("The weather in Rome?")];
    for (let turn = 0; turn < 2; turn += 1) {
      let answer;
      if (isStreamed) {
        for await (const chunk of await forced.stream(history)) {
          answer = answer === undefined ? chunk : answer.concat(chunk);
        }
      } else {
        answer = await forced.invoke(history);
      }
      assert.ok(answer.tool_calls.length > 0);
      history.push(answer);
      for (const call of answer.tool_calls) history.push(await weather.invoke(call));
    }
    assert.ok(history.at(-1) instanceof ToolMessage);
    await model.bindTools([weather], { tool_choice: "none" }).invoke(history);
  }
}

const ONE_CALL = {
  toolChoice: { type: "function", function: { name: "weather" } },
  modelSettings: { parallel_tool_calls: false },
};
const firstATool = createMiddleware({
  name: "FirstATool",
  wrapModelCall: (request, handler) => handler({
    ...request, ...(request.messages.length < 2 ? ONE_CALL : { tools: [] }) }),
});

async function agents(useResponsesApi) {
  const agent = createAgent({
    model: makeModel(useResponsesApi, 300), tools: [weather], systemPrompt: "Be short",
    responseFormat: providerStrategy(City), middleware: [firstATool] });
  const result = await agent.invoke({ messages: [{ role: "user", content: "A city" }] });
  const types = result.messages.map((message) => message.getType());
  assert.deepEqual(types, ["human", "ai", "tool", "ai"]);
  assert.ok(City.parse(result.structuredResponse));
}

async function objects(useResponsesApi) {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const model = makeModel(useResponsesApi, 300);
    const structured = model.withStructuredOutput(City, { method, name: "city" });
    assert.ok(City.parse(await structured.invoke("A city")));
  }
}

async function aborts(useResponsesApi) {
  const model = makeModel(useResponsesApi, 3000);
  for (const isStreamed of [true, false]) {
    const leaving = new AbortController();
    const { signal } = leaving;
    await aborted(async () => {
      if (isStreamed) {
        const reading = (async () => {
          for await (const chunk of await model.stream(LONG, { signal })) {
            if (chunk.text) leaving.abort();
          }
        })();
        await assert.rejects(reading);
      } else {
        setTimeout(() => leaving.abort(), 100);
        await assert.rejects(model.invoke(LONG, { signal }));
      }
    });
  }
}

for (const useResponsesApi of [false, true]) {
  for (const step of [chat, tools, agents, objects, aborts]) {
    await step(useResponsesApi).catch((error) => {
      throw new Error(`${useResponsesApi ? "responses" : "chat"}, ${step.name}`, { cause: error });
    });
  }
}
