// opencode, with a short prompt and one tool, so that the demo model's context holds them: a turn,
// a continued session, an interrupt.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

const home = mkdtempSync(join(tmpdir(), "opencode-"));
const model = `baton/${MODEL}`;
const env = {
  ...process.env, HOME: home, PWD: home, OPENCODE_DISABLE_MODELS_FETCH: "1" };
const settings = { cwd: home, env, stdio: ["ignore", "pipe", "inherit"] };

function configure(output, options) {
  const provider = {
    npm: "@ai-sdk/openai-compatible",
    options: { baseURL: V1, apiKey: "none" },
    models: { [MODEL]: { limit: { context: 4096, output }, options } },
  };
  writeFileSync(join(home, "opencode.json"), JSON.stringify({
    provider: { baton: provider }, model, small_model: model, autoupdate: false,
    share: "disabled",
    agent: { build: { prompt: "Be short.", tools: { "*": false, read: true } } },
  }));
}

configure(64, {});
for (const more of [[], ["--continue"]]) {
  const command = ["run", "--format", "json", ...more, "What is a lambda?"];
  const printed = execFileSync("opencode", command, settings).toString();
  const events = printed.trim().split("\n").map((line) => JSON.parse(line));
  assert.ok(events.some(({ type, part }) => type === "text" && part.text), printed);
  const { part } = events.filter(({ type }) => type === "step_finish").at(-1);
  assert.ok(["stop", "length"].includes(part.reason), part.reason);
  assert.ok(part.tokens.output > 0);
}
configure(2048, { min_tokens: 2000 });
await aborted(async () => {
  const asked = spawn("opencode", ["run", "--format", "json", LONG], settings);
  for await (const printed of asked.stdout) {
    if (/step_start/.test(printed)) break;
  }
  asked.kill("SIGINT");
});
