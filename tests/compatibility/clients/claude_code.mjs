// Claude Code, with a short system prompt and one tool, so that the demo model's context holds them:
// a turn, a continued session as a stream of events, an interrupt, and a prompt that is too long.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { FLEET, LONG, MODEL, aborted } from "./baton_fleet.mjs";

const home = mkdtempSync(join(tmpdir(), "claude-code-"));
const env = {
  ...process.env,
  HOME: home,
  ANTHROPIC_BASE_URL: FLEET,
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_RETRIES: "0",
  DISABLE_AUTOUPDATER: "1",
};
const settings = { cwd: home, env, stdio: ["ignore", "pipe", "inherit"] };
const FLAGS = [
  "--print", "--verbose", "--output-format", "stream-json", "--include-partial-messages",
  "--system-prompt", "Be short", "--tools", "Read", "--setting-sources", "",
  "--strict-mcp-config", "--disable-slash-commands",
];

function turn(maxTokens, ...words) {
  const limited = { ...settings, env: { ...env, CLAUDE_CODE_MAX_OUTPUT_TOKENS: maxTokens } };
  const printed = execFileSync("claude", [...FLAGS, ...words], limited).toString();
  const events = printed.trim().split("\n").map((line) => JSON.parse(line));
  const deltas = events.filter(({ event }) => event?.delta?.type === "text_delta");
  const [result] = events.filter((event) => event.type === "result");
  return { result, streamed: deltas.map(({ event }) => event.delta.text).join("") };
}

for (const more of [[], ["--continue"]]) {
  const { result, streamed } = turn("200", ...more, "What is a lambda?");
  assert.equal(result.is_error, false, JSON.stringify(result));
  assert.ok(streamed.endsWith(result.result));
  assert.ok(result.usage.output_tokens > 0);
}
assert.throws(() => turn("200", "word ".repeat(9000)), (error) => (
  /prompt is too long/i.test(error.stdout.toString())));
await aborted(async () => {
  const limited = { ...settings, env: { ...env, CLAUDE_CODE_MAX_OUTPUT_TOKENS: "1000" } };
  const asked = spawn("claude", [...FLAGS, LONG], limited);
  for await (const printed of asked.stdout) {
    if (/text_delta/.test(printed)) break;
  }
  asked.kill("SIGINT");
});
