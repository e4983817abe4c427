// What the guard adds to the time to the first content of a turn with a history of 32k tokens, beside the engine's own
// `/tokenize`: baton and simulated engines in this process, which tokenise for real, one request at a time. Times are the
// phases that baton itself counts (docs/metrics.md). Arguments: turns (default 40), tokens of the history (default 32768).

import { post, startHarness } from '../test/support/harness.ts';
import { machine } from './store-process.mjs';

const turns = Number(process.argv[2] ?? 40);
const tokens = Number(process.argv[3] ?? 32_768);
const WARM_UP = 5;
const PHASES = ['plan', 'tokenize', 'prefill', 'hand_over'];

await using harness = await startHarness({
  prefill: 1,
  decode: 1,
  engine: {
    bidirectional: true,
    eosEvery: 0,
    maxModelLen: 2 * tokens,
    numBlocks: Math.ceil((3 * (turns + WARM_UP) * tokens) / 16),
  },
  yaml: 'pools: {prefill: {bidirectional: on}}\nreuse: {autolink: false, pin_watermark: 0}\nlog: {level: warn}\n',
});
await harness.ready();

/** A history of so many tokens: the simulated tokenizer makes one of each byte. */
const historyOf = (name) => [
  { role: 'user', content: `${name} carries the baton to the next. `.repeat(tokens).slice(0, tokens) },
];
const bodyOf = (messages, more) => ({ model: 'sim-model', messages, max_tokens: 4, stream: true, ...more });
const chat = (body) => post(`${harness.url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });

/** Milliseconds that all requests so far spent in each phase. */
async function phases() {
  const text = await (await fetch(`${harness.adminUrl}/metrics`)).text();
  return PHASES.map((phase) => {
    const line = text
      .split('\n')
      .find((one) => one.startsWith('baton_ttft_seconds_sum{') && one.includes(`phase="${phase}"`));
    return Number(line?.split(' ').at(-1) ?? 0) * 1000;
  });
}

async function timed(run) {
  const before = await phases();
  const startedAt = performance.now();
  const reply = await run();
  const total = performance.now() - startedAt;
  const after = await phases();
  if (reply.status !== 200) throw new Error(reply.text);
  return { reply, total, spent: after.map((sum, i) => sum - before[i]) };
}

const rows = { own: [], cold: [], hit: [] };
for (let i = -WARM_UP; i < turns; i += 1) {
  const name = `t${i}`;
  const first = historyOf(name);
  await chat(bodyOf(first, { conversation_id: name }));
  const next = [...first, { role: 'assistant', content: 'ok' }, { role: 'user', content: 'Go on.' }];
  // The handle is put off the client's path.
  await new Promise((done) => setTimeout(done, 30));
  const startedAt = performance.now();
  const { count } = JSON.parse(
    (await post(`${harness.prefill[0].url}/tokenize`, { model: 'sim-model', messages: next })).text,
  );
  const own = performance.now() - startedAt;
  const cold = await timed(() => chat(bodyOf(next)));
  const hit = await timed(() => chat(bodyOf(next, { conversation_id: name })));
  const plan = hit.reply.headers.get('x-baton-plan') ?? '';
  if (!/outcome=hit/.test(plan) || count < tokens) throw new Error(`no hit: ${plan}, ${count} tokens`);
  if (i < 0) continue;
  rows.own.push([own]);
  rows.cold.push([...cold.spent, cold.total]);
  rows.hit.push([...hit.spent, hit.total]);
}

const quantile = (values, q) =>
  values.toSorted((a, b) => a - b)[Math.min(values.length - 1, Math.floor(values.length * q))];
const cell = (list, column) => {
  const values = list.map((row) => row[column]);
  return [0, 0.5, 0.9].map((q) => quantile(values, q).toFixed(2)).join(' / ');
};
console.log(`${machine}; ${turns} turns with ${tokens} tokens of history; milliseconds: least / median / 90 %\n`);
console.log('| what | without a handle | with one |');
console.log('|---|---:|---:|');
for (const [column, phase] of PHASES.entries()) {
  console.log(`| phase \`${phase}\` | ${cell(rows.cold, column)} | ${cell(rows.hit, column)} |`);
}
console.log(`| the engine's own \`/tokenize\`, asked by the client | | ${cell(rows.own, 0)} |`);
const parts = [0, 0.5, 0.9].map((q) => {
  const [plan, tokenize, before] = [rows.hit, rows.hit, rows.cold].map((list, i) =>
    quantile(
      list.map((row) => row[i % 2]),
      q,
    ),
  );
  return { question: plan + tokenize - before, guard: plan - before };
});
const sums = (key) => parts.map((part) => part[key].toFixed(2)).join(' / ');
console.log(`| added before the prefill leg: question and guard | | ${sums('question')} |`);
console.log(`| of it the plan and the guard alone | | ${sums('guard')} |`);
