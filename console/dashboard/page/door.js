// At the door: what became of the last minute's requests, by key; and what the fleet goes on without.

import { age, clock, int } from "./numbers.js";
import { Card, html, Table } from "./parts.js";

const NUMBERS = ["accepted", "4xx", "429", "5xx", "left", "slow", "waiting"];

export const Door = ({ rows }) =>
	rows.length > 0 &&
	html`<${Card} extra="door" title="At the door" note="requests of the last minute; slow ones missed a target">
		<${Table}
			label="Requests by key"
			columns=${["key", ...NUMBERS.map((name) => [name, "num"])]}
			rows=${rows.map(([key, name, ...numbers]) => [
				key ? html`<a href="#/requests/?${encodeURIComponent(key)}">${name}</a>` : name,
				...numbers.map((each) => int(each)),
			])}
		/>
	<//>`;

export const Outages = ({ list, now }) =>
	list.map(
		([title, text, us]) =>
			html`<div class="banner"><b>${title}</b><span>${text} Since ${clock(us)} (${age(now - us / 1000)}).</span></div>`,
	);
