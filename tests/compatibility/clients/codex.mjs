// Codex, with short instructions and few tools, so that the demo model's context holds them: a turn,
// a resumed session, an interrupt, and a prompt that is too long.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { LONG, MODEL, V1, aborted } from "./baton_fleet.mjs";

const home = mkdtempSync(join(tmpdir(), "codex-"));
const instructions = join(home, "short.md");
writeFileSync(instructions, "Be short.");
writeFileSync(join(home, "config.toml"), `
model = "${MODEL}"
model_provider = "baton"
model_instructions_file = "${instructions}"
[model_providers.baton]
name = "baton"
base_url = "${V1}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`);
const settings = {
  cwd: home, env: { ...process.env, CODEX_HOME: home }, stdio: ["ignore", "pipe", "ignore"] };
const FLAGS = ["--skip-git-repo-check", "--json", ...disabled()];

function disabled() {
  const features = execFileSync("codex", ["features", "list"], settings).toString().split("\n");
  const enabled = features.filter((line) => / true *$/.test(line) && !/removed/.test(line));
  return enabled.flatMap((line) => ["--disable", line.split(" ")[0]]);
}

function turn(...words) {
  const printed = execFileSync("codex", ["exec", ...words], settings).toString();
  const events = printed.trim().split("\n").map((line) => JSON.parse(line));
  const [{ usage }] = events.filter((event) => event.type === "turn.completed");
  const items = events.filter((event) => event.item?.type === "agent_message");
  return { text: items.at(-1).item.text, usage };
}

const first = turn(...FLAGS, "What is a lambda?");
assert.ok(first.text);
const second = turn("resume", "--last", ...FLAGS, "And a closure?");
assert.ok(second.text);
assert.ok(second.usage.input_tokens > first.usage.input_tokens);
assert.throws(() => turn(...FLAGS, "word ".repeat(9000)), (error) => (
  /ran out of room in the model's context window/.test(error.stdout)));
await aborted(async () => {
  const asked = spawn("codex", ["exec", ...FLAGS, LONG], settings);
  for await (const printed of asked.stdout) {
    if (/turn.started/.test(printed)) break;
  }
  await new Promise((resolve) => setTimeout(resolve, 300));
  asked.kill("SIGINT");
});
