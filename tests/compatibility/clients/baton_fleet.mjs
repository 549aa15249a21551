// What the programs for Node share: the fleet's address, and whether it noticed an abort.

import assert from "node:assert/strict";

export const FLEET = process.env.BATON_TEST_URL;
export const V1 = `${FLEET}/v1`;
export const MODEL = "demo_model";
export const LONG = "Explain all modules of the standard library, one by one";
const DEADLINE_MS = 5_000;

async function numClientsGone() {
  const metrics = await (await fetch(`${FLEET}/metrics`)).text();
  const lines = metrics.matchAll(/^baton_http_requests_total\{.*status="499"\} (\S+)$/gm);
  return [...lines].reduce((sum, [, value]) => sum + Number(value), 0);
}

async function numRunning() {
  const { workers } = await (await fetch(`${FLEET}/fleet`)).json();
  return workers.reduce((sum, each) => sum + each.num_running + each.num_waiting, 0);
}

/** Runs `abort`, which leaves a request before its end: the fleet must notice and stop its work. */
export async function aborted(abort) {
  const before = await numClientsGone();
  await abort();
  const deadline = Date.now() + DEADLINE_MS;
  while ((await numClientsGone()) === before || (await numRunning()) > 0) {
    assert.ok(Date.now() < deadline, "the fleet did not notice that its client went away");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
