import { expect } from 'vitest';
import { converse, type Told } from './chaos-clients.ts';
import { disturb } from './chaos-events.ts';
import { ChaosWorld, hostOf } from './chaos-world.ts';
import { drawOf, until } from './reuse-world.ts';

const CLIENTS = 200;
/** Errors before content, a share of all requests. */
const MOST_ERRORS = 0.005;
/** The engines' limit, and what may pass until it is seen. */
const PINS_GONE_MS = 20_000 + 10_000;

/** Two hundred conversations over pools in which something always goes wrong, for so long; prints what happened. */
export async function runChaos(ms: number, seed: number): Promise<void> {
  const before = resources();
  await using stack = new AsyncDisposableStack();
  const world = stack.use(await ChaosWorld.start());
  const ready = async () => ((await (await fetch(`${world.url}/health`)).json()) as Health).instances.ready === 12;
  expect(await until(async () => ((await ready()) ? true : undefined), 20_000)).toBe(true);

  const told: Told[] = [];
  const end = performance.now() + ms;
  const isOver = () => performance.now() > end;
  const events = disturb(world, drawOf(seed), isOver);
  const clients = Array.from({ length: CLIENTS }, (_, index) =>
    converse(world, `client-${index}`, drawOf(seed + index + 1), isOver, (one) => told.push(one)),
  );
  const [counts] = await Promise.all([events, ...clients]);
  const endedAt = performance.now();

  const lines = new Map(world.log.filter(({ msg }) => msg === 'request').map((line) => [line['request_id'], line]));
  const of = (kind: Told['kind']) => told.filter((one) => one.kind === kind);
  const errors = of('error').map(({ id, status, text }) => ({ id, status, text, line: lines.get(id) }));
  const outcomes: Record<string, number> = {};
  for (const { reuse } of [...lines.values()]) outcomes[String(reuse)] = (outcomes[String(reuse)] ?? 0) + 1;
  process.stdout.write(
    JSON.stringify({
      seed,
      requests: told.length,
      whole: of('whole').length,
      cut: of('cut').length,
      errors: errors.map(({ status, line }) =>
        [status, line?.['error'], line?.['failed_leg'], line?.['retries']].join(' '),
      ),
      counts,
      outcomes,
    }).concat('\n'),
  );
  expect(of('wrong')).toEqual([]);
  expect(told.length).toBeGreaterThan(CLIENTS);
  expect(errors.length / told.length, JSON.stringify(errors.slice(0, 5))).toBeLessThan(MOST_ERRORS);
  // The ladder was gone down to its end: a leg failed, and nothing was left to repeat it with.
  for (const { line } of errors) {
    expect(line).toMatchObject({ failed_leg: expect.any(String), ending: 'failed' });
  }

  await expectNothingLeft(world, endedAt);
  await stack.disposeAsync();
  // Sockets close in their own time.
  const more = () => Object.entries(resources()).filter(([name, count]) => count > (before[name] ?? 0));
  await until(() => (more().length === 0 ? true : undefined), 10_000);
  expect(more()).toEqual([]);
}

interface Health {
  readonly instances: { readonly ready?: number };
}

/** Every count is back at zero: requests, places, what engines run and what they keep for readers. */
async function expectNothingLeft(world: ChaosWorld, endedAt: number): Promise<void> {
  const busy = () =>
    world.engines.filter((sim) => {
      const { running, loading, waiting, hanging } = sim.state();
      return running + loading + waiting + hanging > 0;
    }).length;
  await until(() => (busy() === 0 ? true : undefined), 10_000);
  expect(busy()).toBe(0);
  const leaks = async () => {
    const read = await world.metrics();
    const names = ['baton_requests_in_flight', 'baton_queue_depth', 'baton_instance_legs'];
    return names.map((name) => `${name} ${read(name)}`).filter((line) => !line.endsWith(' 0'));
  };
  await until(async () => ((await leaks()).length === 0 ? true : undefined), 10_000);
  expect(await leaks()).toEqual([]);
  const pins = () => world.engines.reduce((sum, sim) => sum + sim.state().pins, 0);
  await until(() => (pins() === 0 ? true : undefined), endedAt + PINS_GONE_MS - performance.now());
  expect(pins()).toBe(0);
  // No router can keep an engine that stood still from reading late; that it gets no turn after that is what counts.
  const distrusted = await world.distrusted();
  for (const sim of world.engines) {
    const { mismatchedPulls, latePulls, doubleReads, leakedPins, leakedBlocks } = sim.state();
    expect({ doubleReads, leakedPins, leakedBlocks }).toEqual({ doubleReads: 0, leakedPins: 0, leakedBlocks: 0 });
    const told = world.log
      .filter(({ instance, msg }) => instance === hostOf(sim) && msg !== 'request')
      .map((line) => JSON.stringify(line));
    if (!distrusted.includes(sim))
      expect({ mismatchedPulls, latePulls }, [sim.role, ...told].join('\n')).toEqual({
        mismatchedPulls: 0,
        latePulls: 0,
      });
  }
}

/** What keeps this process alive, by kind. */
function resources(): Readonly<Record<string, number>> {
  const counts: Record<string, number> = {};
  for (const name of process.getActiveResourcesInfo()) counts[name] = (counts[name] ?? 0) + 1;
  return counts;
}
