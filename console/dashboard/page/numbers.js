// Numbers and names as the page writes them; pure. `null` and `undefined` mean "not known" and
// become a dash.

const NB = "\u00a0";
export const DASH = "–";

export const known = Number.isFinite;

const orDash = (write) => (v, ...rest) => (known(v) ? write(v, ...rest) : DASH);

/** 15,234 */
export const int = orDash((v) => Math.round(v).toLocaleString("en-US"));

/** Three significant digits: 0.42, 4.21, 22.4, 418 */
export const sig3 = orDash((v) => {
	const size = Math.abs(v);
	if (size === 0) return "0";
	if (size >= 99.95) return int(v);
	return size >= 9.995 ? v.toFixed(1) : v.toFixed(2);
});

/** A duration: `22.4 ms`, from one second on `1.48 s`. */
export const ms = orDash((v) => (v >= 999.5 ? `${sig3(v / 1000)}${NB}s` : `${sig3(v)}${NB}ms`));

const tenths = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
/** Milliseconds with one decimal, as in a table whose rows add up. */
export const ms1 = orDash((v, unit = "") => tenths.format(v) + unit);
export const MS = `${NB}ms`;

/** Such rows: each as long as the difference of its rounded ends, so that they add up as written. */
export function rows1(times) {
	const round = (v) => Math.round(v * 10) / 10;
	let end = 0;
	return times.map((each) => round((end += each)) - round(end - each));
}

/** A size in memory: `4.00 MiB`. */
export const bytes = orDash((v) => {
	const units = ["B", "KiB", "MiB", "GiB", "TiB"];
	const power = Math.min(4, Math.floor(Math.log2(Math.max(1, v)) / 10));
	return `${(power ? sig3 : int)(v / 1024 ** power)}${NB}${units[power]}`;
});

/** The rate of a link, in decimal units. */
export const linkRate = orDash((v) => {
	const [size, unit] = v === 0 || v >= 1e7 ? [1e9, "GB"] : v >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
	return `${sig3(v / size)}${NB}${unit}/s`;
});

/** Tokens: 1,607, then 14.9k, then 1.20M. */
export const kilo = orDash((v) => {
	if (v >= 999_950) return `${sig3(v / 1e6)}M`;
	return v >= 9_999.5 ? `${sig3(v / 1e3)}k` : int(v);
});

/** A share of one: `71 %`, under a tenth `9.5 %`. */
export const share = orDash((v) => `${(v * 100).toFixed(v < 0.0995 && v > 0 ? 1 : 0)}${NB}%`);

/** A share of one with one decimal, as goodput is shown. */
export const share1 = orDash((v) => (v === 1 ? `100${NB}%` : `${(v * 100).toFixed(1)}${NB}%`));

/** Pressure: `1.42×`. */
export const times = orDash((v) => `${v.toFixed(2)}×`);

let clockStepUs = 0;
/** How far the router's system clock is ahead of the clock of its reports. */
export const setClockStep = (us) => (clockStepUs = us);

/** Time of day in UTC, by the router's system clock: 03:07:42. */
export const clock = orDash((us) => new Date((us + clockStepUs) / 1000).toISOString().slice(11, 19));

/** How long ago: `7.4 s`, `51 s`, `19 min`, `6 h`. */
export const age = orDash((milliseconds) => {
	const s = Math.max(0, milliseconds / 1000);
	if (s < 10) return `${s.toFixed(1)}${NB}s`;
	if (s < 120) return `${Math.floor(s)}${NB}s`;
	return s < 7200 ? `${Math.floor(s / 60)}${NB}min` : `${Math.floor(s / 3600)}${NB}h`;
});

/** `chatcmpl-7f3ca1d2` for a request id with 32 digits. */
export const shortId = (id) => id.replace(/^([A-Za-z]+[-_][A-Za-z0-9]{8}).*$/, "$1");

export const plural = (v, noun) => (v === 1 ? noun : `${noun}s`);

/** `1 request`, `7 requests`. */
export const count = (v, noun, write = int) => `${write(v)}${NB}${plural(v, noun)}`;

/** A coordinate of a drawing. */
export const px = (v) => v.toFixed(1);

/** Ticks of an axis from 0 that cover `high`: two steps of a round size. */
export function ticks(high) {
	const power = 10 ** Math.floor(Math.log10(high / 2));
	const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => high / each <= 2.0001);
	return [0, step, 2 * step];
}

/** Whether a value is above its target, as far as both are known. */
export const over = (v, target) => known(v) && known(target) && v > target;
