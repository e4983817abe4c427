import { expect } from 'vitest';
import { drawOf, until, wait } from './reuse-world.ts';
import { type Turn, talk } from './soak-clients.ts';
import { ADAPTERS, type SoakOptions, SoakWorld, TEMPLATES } from './soak-world.ts';

const CLIENTS = 40;
/** Turns between two changes of the template, and between two of an adapter's weights. */
const ROLLOUT_TURNS = 700;
const RELOAD_TURNS = 150;

/** What a run came to. */
export interface SoakResult {
  readonly kinds: Readonly<Record<string, number>>;
  readonly wrong: readonly string[];
  /** Failures while nothing was done to any engine. */
  readonly unexcused: readonly string[];
  /** Outcomes, of all turns and of those with each mark. */
  readonly outcomes: Readonly<Record<string, Readonly<Record<string, number>>>>;
}

/** So many turns of clients that do whatever changes a history, while templates, adapters and pictures change under them. */
export async function expectSoak(turns: number, seed: number): Promise<void> {
  const { wrong, unexcused, kinds, outcomes } = await runSoak(turns, seed);
  expect(wrong).toEqual([]);
  expect(unexcused).toEqual([]);
  expect(kinds['right']).toBeGreaterThan(turns * 0.95);
  // Whole handles are rare: what the model thought is left out of the next prompt.
  expect(outcomes['all']?.['hit_cut']).toBeGreaterThan(turns / 10);
  expect(outcomes['all']?.['hit']).toBeGreaterThan(0);
  for (const mark of ['inline picture', 'several pictures']) {
    const { hit = 0, hit_cut: cut = 0 } = outcomes[mark] ?? {};
    expect({ mark, met: hit + cut > 0 }).toEqual({ mark, met: true });
  }
  const { hit: linked = 0, hit_cut: linkedCut = 0 } = outcomes['linked picture'] ?? {};
  expect(linked + linkedCut).toBe(0);
  for (const mark of MARKS) expect({ mark, met: outcomes[mark] !== undefined }).toEqual({ mark, met: true });
}

/** What the clients of a run must have done. */
const MARKS = [
  'tools',
  'tool_choice none',
  'reasoning_effort',
  'truncate_prompt_tokens',
  'inline picture',
  'several pictures',
  'linked picture',
  'adapter',
  'thoughts sent',
  'thoughts left out',
  'linked by history',
  'regenerate',
  'edit',
  'branch',
  'tool',
];

/** The same without a word on how it went. */
export async function runSoak(turns: number, seed: number, options: SoakOptions = {}): Promise<SoakResult> {
  await using world = await SoakWorld.start(options);
  const kinds: Record<string, number> = {};
  const outcomes: Record<string, Record<string, number>> = { all: {} };
  const wrong: string[] = [];
  const unexcused: string[] = [];
  let begun = 0;
  let ended = 0;
  const startedAt = performance.now();
  const next = () => {
    begun += 1;
    return begun <= turns && wrong.length < 5;
  };
  const tell = ({ kind, status, outcome, marks, detail }: Turn) => {
    ended += 1;
    const ending = kind === 'failed' ? `${kind} ${status}` : kind;
    kinds[ending] = (kinds[ending] ?? 0) + 1;
    for (const mark of ['all', ...marks]) {
      const counts = outcomes[mark] ?? {};
      outcomes[mark] = counts;
      counts[outcome] = (counts[outcome] ?? 0) + 1;
    }
    if (kind === 'wrong') wrong.push(detail);
    else if (detail !== '') unexcused.push(detail);
    if (ended % 5000 === 0) {
      const { rss } = process.memoryUsage();
      const seconds = Math.round((performance.now() - startedAt) / 1000);
      process.stdout.write(`${ended} turns, ${seconds} s, ${Math.round(rss / 2 ** 20)} MiB\n`);
    }
  };
  let isOver = false;
  const operator = operate(
    world,
    seed,
    () => ended,
    () => isOver,
  );
  const clients = Array.from({ length: CLIENTS }, (_, i) => talk(world, `c${i}`, drawOf(seed + i + 1), next, tell));
  await Promise.all(clients).finally(() => {
    isOver = true;
  });
  await operator;
  const ranks = world.engines.map((sim) => sim.state().rankRequests);
  let left: readonly string[] = [];
  await until(async () => {
    left = await world.leftovers();
    return left.length === 0 ? true : undefined;
  }, world.keptMs);
  for (const sim of world.engines) world.harm.add(sim.state());
  const { harm, done, warnings } = world;
  const seconds = Math.round((performance.now() - startedAt) / 1000);
  const rss = Math.round(process.memoryUsage().rss / 2 ** 20);
  const sums = JSON.stringify({ seed, turns: ended, seconds, rss, kinds, outcomes, done, harm, ranks, warnings });
  process.stdout.write(`${[sums, ...wrong, ...unexcused].join('\n')}\n`);
  expect(left, sums).toEqual([]);
  if (options.flags === undefined) {
    expect(harm, sums).toMatchObject({
      deaths: [],
      counts: { mismatchedPulls: 0, leakedPins: 0, leakedBlocks: 0, expiredReads: 0, doubleReads: 0, hung: 0 },
    });
    // Ids of engines with several ranks alternated.
    for (const requests of ranks) for (const count of requests) expect(count, sums).toBeGreaterThan(0);
  }
  return { kinds, wrong, unexcused, outcomes };
}

/** Changes templates and adapters in turn, each time so many turns later. */
async function operate(world: SoakWorld, seed: number, ended: () => number, isOver: () => boolean): Promise<void> {
  const draw = drawOf(seed ^ 0x0b5);
  let template = 0;
  for (let count = 1; !isOver(); count += 1) {
    while (ended() < count * RELOAD_TURNS && !isOver()) {
      await world.heal();
      await wait(250);
    }
    if (isOver()) return;
    await world.reloadAdapter(draw.pick(ADAPTERS as unknown as [string, ...string[]]));
    if ((count * RELOAD_TURNS) % ROLLOUT_TURNS >= RELOAD_TURNS) continue;
    template = (template + 1) % TEMPLATES.length;
    await world.rollOut(TEMPLATES[template] ?? 'plain', draw);
  }
}
