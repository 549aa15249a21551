// Which side is short, and since when: verdict, pools with their flows, the last hour.

import { LastHour } from "./hour.js";
import { CARD_PX, Flows, PairTable } from "./flows.js";
import { DASH, int, kilo, known, linkRate, ms, share1, times } from "./numbers.js";
import { Empty, html, Pool, Tag } from "./parts.js";
import { hasNumbers, MAX_CARDS, WorkerCard, WorkerRows } from "./workers.js";

export const SHORT = 1;
export const TIGHT = 0.9;

export function Fleet({ live, fleet }) {
	if (!fleet.workers?.length) return html`<${NoWorker} cluster=${fleet.cluster} />`;
	const prefill = fleet.workers.filter((each) => each.role === "prefill");
	const decode = fleet.workers.filter((each) => each.role === "decode");
	return html`<${Verdict} fleet=${fleet} />
		<div class="grid fleet">
			<section class="card">
				<header>
					<h2>Pools and flows</h2>
					<span class="legend right"
						><span><i class="fill-n"></i>KV in use</span
						><span><i class="soft-n"></i>cached, reusable</span></span
					>
				</header>
				<${Pools} prefill=${prefill} decode=${decode} pairs=${fleet.pairs ?? []} now=${live.now()} />
				<${PairTable}
					pairs=${fleet.pairs ?? []}
					prefill=${prefill.filter(hasNumbers)}
					decode=${decode.filter(hasNumbers)}
				/>
			</section>
			<${LastHour} fleet=${fleet} nowUs=${live.now() * 1000} />
		</div>`;
}

const NoWorker = ({ cluster }) =>
	html`<${Empty}
		title="No worker has joined"
		command=${"baton prefill --model ... --host 10.0.0.2\nbaton decode  --model ... --host 10.0.0.3"}
	>
		This router${cluster ? html` of cluster <b>${cluster}</b>` : null} sees no worker under its Redis.
		Start one of each role with the same cluster name and secret:
	<//>`;

function Verdict({ fleet }) {
	const pressure = fleet.pressure ?? {};
	const { title, cause, role, hasData } = verdictOf(pressure);
	return html`<h2 class="sr">Pressure</h2>
		<section class="card verdict" aria-label="Verdict">
			<div aria-live="polite">
				<h1>${role ? html`<${Pool} role=${role} />` : null}${title}</h1>
				<p>${cause} ${hasData && fleet.offers?.includes("doctor") ? html`<a href="#/doctor">What to change</a>` : null}</p>
			</div>
			<div
				class="pd"
				role="img"
				aria-label=${`Pressure: prefill ${times(pressure.prefill)} its target, decode ${times(pressure.decode)} its target`}
			>
				<${Side}
					role="prefill"
					value=${pressure.prefill}
					state=${pressure.prefill_state}
					note=${`next first token ${ms(pressure.predicted_ttft_ms)}, target ${ms(fleet.targets?.ttft_target_ms)}`}
				/>
				<${Side}
					role="decode"
					value=${pressure.decode}
					state=${pressure.decode_state}
					note=${`next token ${ms(pressure.predicted_step_ms)}, target ${ms(fleet.targets?.tpot_target_ms)}`}
				/>
			</div>
			<${Strip} totals=${fleet.totals ?? {}} targets=${fleet.targets ?? {}} />
		</section>`;
}

/** The words of the verdict, and the pool that it names. */
export function verdictOf(pressure) {
	const hasData = known(pressure.prefill) || known(pressure.decode);
	const title = pressure.verdict ?? (hasData ? "Both pools are measured" : "No request in the last minute");
	const cause =
		pressure.cause ??
		(hasData ? "Neither pool is near its target." : "Pressure is measured from the prompts of the last minute, and there were none.");
	const role = /^prefill/i.test(title) ? "prefill" : /^decode/i.test(title) ? "decode" : null;
	return { title, cause, role, hasData };
}

/** One half of the pressure bar; the scale ends at twice the target. */
function Side({ role, value, state, note }) {
	const at = role === "prefill" ? "right" : "left";
	const width = known(value) ? (Math.min(value, 2) / 2) * 100 : 0;
	const [base, over] = [Math.min(width, 50), Math.max(0, width - 50)];
	const now = !known(value) ? null : value > SHORT ? "short" : value > TIGHT ? "tight" : "has room";
	const kind = state ?? now;
	const tags = { short: "bad", tight: "warn", "has room": "ok" };
	return html`<div class="pd-side ${role[0]}">
		<div class="pd-name">
			<${Pool} role=${role} /><span>${role === "prefill" ? "Prefill" : "Decode"}</span><b>${times(value)}</b>
			${kind ? html`<${Tag} kind=${tags[kind]}>${kind}<//>` : null}
		</div>
		<div class="pd-track">
			<i class="fill-${role[0]}" style=${{ [at]: 0, width: `${base}%` }} />
			${over ? html`<i class="over" style=${{ [at]: "50%", width: `${over}%` }} />` : null}
			<i class="tick ${role[0]}" />
		</div>
		<div class="pd-scale ${role[0]}"><span>target</span></div>
		<div class="pd-note">${note}</div>
	</div>`;
}

function Strip({ totals, targets }) {
	const rates = known(totals.good_requests_per_s)
		? `${totals.good_requests_per_s.toFixed(1)} of ${totals.requests_per_s?.toFixed(1) ?? DASH} req/s`
		: "";
	const output = totals.output_tokens_per_s;
	const rows = [
		["Goodput", share1(totals.goodput), rates],
		["TTFT p95", ms(totals.ttft_p95_ms), `target ${ms(targets.ttft_target_ms)}`],
		["TPOT p95", ms(totals.tpot_p95_ms), `target ${ms(targets.tpot_target_ms)}`],
		["In flight", int(totals.num_inflight), "requests"],
		["Output", kilo(output), "tokens/s"],
		["KV moved", linkRate(totals.bytes_moved_per_s), ""],
	];
	return html`<dl class="strip">
		${rows.map(
			([name, value, note]) => html`<div><dt>${name}</dt><dd>${value} <small>${note}</small></dd></div>`,
		)}
	</dl>`;
}

function Pools({ prefill, decode, pairs, now }) {
	const isSmall = prefill.length <= MAX_CARDS && decode.length <= MAX_CARDS;
	const head = (role, workers) => {
		const ready = workers.filter((each) => each.state === "ready").length;
		return html`<h3 class=${role[0]}>
			<${Pool} role=${role} />${role === "prefill" ? "Prefill" : "Decode"}
			<span class="faint">${ready} of ${workers.length} ready</span>
		</h3>`;
	};
	const pool = (role, workers) =>
		isSmall
			? html`<ul class="wk ${role[0]}">
					${workers.map((each) => html`<${WorkerCard} worker=${each} now=${now} key=${each.worker_id} />`)}
					${workers.length ? null : html`<li class="w off">No ${role} worker has joined.</li>`}
				</ul>`
			: html`<div class="wk ${role[0]}"><${WorkerRows} workers=${workers} now=${now} role=${role} /></div>`;
	return html`<div class="pools">
		${head("prefill", prefill)}
		<h3 class="mid">${isSmall ? "KV blocks →" : ""}</h3>
		${head("decode", decode)} ${pool("prefill", prefill)}
		${isSmall
			? html`<${Flows}
					pairs=${pairs}
					prefill=${prefill.map((each) => each.worker_id)}
					decode=${decode.map((each) => each.worker_id)}
					rowPx=${CARD_PX}
				/>`
			: html`<div></div>`}
		${pool("decode", decode)}
	</div>`;
}
