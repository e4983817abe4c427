// What reuse saves of the time to the first token: the same made-up conversations through baton with reuse on and off, with
// the prefix caching of the prefill engines on and off. The engines are simulated with a stated cost; baton is a process of
// its own. Arguments: conversations (default 16), milliseconds a prompt token (default 0.2).
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { runMultiTurn } from '../src/bench/multi-turn.ts';
import { readMultiTurnSettings } from '../src/bench/multi-turn-settings.ts';
import { ascending, percentile, sum } from '../src/bench/stats.ts';
import { turnFigures } from '../src/bench/turn-report.ts';
import { startSim } from '../src/sim/start-sim.ts';
import { startBatonProcess } from '../test/support/baton-process.ts';
import { machine } from './store-process.mjs';

const conversations = Number(process.argv[2] ?? 16);
const prefillMsPerToken = Number(process.argv[3] ?? 0.2);
const COST = { prefillMsPerToken, decodeMsPerToken: 2, pullMsPerBlock: 0.05, eosEvery: 0 };
const CLIENTS = 4;
const TURNS = 4;

const folder = mkdtempSync(join(tmpdir(), 'baton-reuse-'));
process.once('exit', () => rmSync(folder, { recursive: true }));
const text = join(folder, 'text.txt');
writeFileSync(text, Array.from({ length: 60_000 }, (_, i) => `word${(i * 7919) % 10_007}`).join(' '));
const constant = (value) => ({ distribution: 'constant', value });
const input = join(folder, 'input.json');
const plan = {
  filetype: 'generate_conversations',
  num_conversations: conversations,
  text_files: [text],
  prompt_input: { num_turns: constant(TURNS * 2), prefix_num_tokens: constant(1000), num_tokens: constant(200) },
  prompt_output: { num_tokens: constant(200) },
};
writeFileSync(input, JSON.stringify(plan));

async function measure(prefixCaching, bidirectional) {
  await using stack = new globalThis.AsyncDisposableStack();
  const start = async (role) => {
    const caching = role === 'decode' || prefixCaching;
    const sim = await startSim({ ...COST, role, bidirectional, prefixCaching: caching });
    stack.defer(() => sim.close());
    return [`--${role}`, sim.url];
  };
  const engines = (await Promise.all(['prefill', 'prefill', 'decode', 'decode'].map(start))).flat();
  const baton = stack.use(await startBatonProcess(engines));
  for (let ready = 0; ready !== 200; await setTimeout(100)) ready = (await fetch(`${baton.url}/readiness`)).status;
  const flags = { 'input-file': input, url: baton.url, 'num-clients': String(CLIENTS), 'no-early-stop': 'true' };
  const read = readMultiTurnSettings({ ...flags, 'send-conversation-id': 'true' }, {});
  const silent = { step: () => undefined, end: () => undefined };
  const run = { signal: new AbortController().signal, tell: () => undefined, bar: () => silent };
  const outcome = await runMultiTurn(read.settings, run);
  if (outcome.errors.length > 0) throw new Error(outcome.errors[0]);
  if (outcome.busy > 0.8) throw new Error(`the client was the limit: ${outcome.busy}`);
  return outcome.turns.map(turnFigures);
}

const ROWS = [
  [false, false],
  [false, true],
  [true, false],
  [true, true],
];
const word = (is) => (is ? 'on' : 'off');
console.log(`${machine}; ${conversations} conversations of ${TURNS} turns, ${JSON.stringify(COST)}\n`);
const heads = Array.from({ length: TURNS }, (_, turn) => `turn ${turn + 1}`);
console.log(`| prefix caching of P | reuse | ${heads.join(' | ')} | hits | tokens saved | tokens computed |`);
console.log(`|---|---|${heads.map(() => '---:|').join('')}---:|---:|---:|`);
for (const [prefixCaching, reuse] of ROWS) {
  const figures = await measure(prefixCaching, reuse);
  const median = (turn) =>
    percentile(ascending(figures.filter((each) => each.turn === turn).map(({ ttft_ms }) => ttft_ms)), 50).toFixed(0);
  const cells = heads.map((_, at) => median(at + 1));
  const total = (key) => sum(figures.map((each) => each[key] ?? 0));
  const input = total('input_num_tokens');
  const hits = figures.filter(({ outcome }) => outcome === 'hit' || outcome === 'hit_cut').length;
  const computed = input - total('cached_tokens');
  console.log(
    `| ${word(prefixCaching)} | ${word(reuse)} | ${cells.join(' | ')} | ${hits} of ${figures.length} | ` +
      `${total('saved_tokens')} | ${computed} of ${input} |`,
  );
}
