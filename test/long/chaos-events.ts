import { randomUUID } from 'node:crypto';
import { Role } from '../../gen/baton/v1/instance_pb.ts';
import type { FaultRule } from '../../src/sim/faults.ts';
import type { Sim } from '../../src/sim/start-sim.ts';
import { type ChaosWorld, hostOf, type PoolRole } from './chaos-world.ts';
import type { Draw } from './property-requests.ts';
import { wait } from './reuse-world.ts';

/** Engines of one pool that are disturbed at a time: the others have to carry on. */
const MOST_DISTURBED = 2;

type Act = (world: ChaosWorld, sim: Sim, draw: Draw) => Promise<void>;

const during = async (sim: Sim, rule: FaultRule, ms: number): Promise<void> => {
  await sim.setFault(rule);
  await wait(ms);
  await sim.clearFaults();
};

/** What can happen to an engine; each leaves it as it was found. */
const ACTS: Readonly<Record<string, Act>> = {
  async kill(_world, sim, draw) {
    await sim.crash();
    await wait(draw.int(200, 2500));
    await sim.restart();
  },
  async restart(_world, sim) {
    await sim.restart();
  },
  async core(_world, sim, draw) {
    await sim.setFault({ kind: 'crash' });
    await wait(draw.int(500, 2000));
    await sim.clearFaults();
    if (sim.state().killed) await sim.restart();
  },
  stall: (_world, sim, draw) => during(sim, { kind: 'stall', ms: draw.int(500, 3000), count: 6 }, 2000),
  pause: (_world, sim, draw) => during(sim, { kind: 'pause' }, draw.int(500, 5000)),
  // Longer than a lease: what a decode engine has not read by then it must not read.
  freeze: (_world, sim, draw) =>
    during(sim, { kind: 'pause' }, sim.role === 'decode' ? draw.int(9000, 15_000) : draw.int(500, 5000)),
  slow: (_world, sim, draw) => during(sim, { kind: 'slow', ms: draw.int(100, 400), count: 20 }, 2500),
  sick: (_world, sim, draw) => during(sim, { kind: 'status', status: draw.pick([500, 502, 503]), count: 6 }, 1500),
  async flap(_world, sim, draw) {
    for (let i = draw.int(2, 4); i > 0; i -= 1) {
      await during(sim, { kind: 'refuse' }, draw.int(50, 300));
      await wait(draw.int(100, 600));
    }
  },
  async drain({ remote }, sim, draw) {
    const instanceId = hostOf(sim);
    await remote.poolRegistry.drainInstance({ instanceId, reason: 'chaos' });
    await wait(draw.int(500, 2500));
    await remote.poolRegistry.resumeInstance({ instanceId });
  },
  async 'file without it'(world, sim, draw) {
    const others = [...world.pools.prefill, ...world.pools.decode];
    await world.rewrite(
      others.filter((other) => other !== sim),
      draw.chance(0.5) ? '  - { url: "no-scheme:1", role: decode }\n' : '',
    );
    await wait(draw.int(1500, 3500));
    await world.rewrite(others);
    await wait(1200);
  },
};

/** Another engine joins a pool by registering itself, renews its lease for a while, and leaves. */
async function guest({ remote, guests }: ChaosWorld, role: PoolRole, draw: Draw): Promise<void> {
  const { poolRegistry } = remote;
  const sim = guests[role];
  const kv = { bidirectional: 'on', lease: { seconds: 10n, nanos: 0 }, decoderTtl: { seconds: 20n, nanos: 0 } };
  const { instance } = await poolRegistry.registerInstance({
    idempotencyKey: randomUUID(),
    instance: { url: sim.url, role: role === 'prefill' ? Role.PREFILL : Role.DECODE, connector: 'nixl', kv },
    lease: { seconds: 5n, nanos: 0 },
  });
  const call = { instanceId: instance?.id ?? '', ...(instance?.incarnation && { incarnation: instance.incarnation }) };
  for (let i = draw.int(2, 8); i > 0; i -= 1) {
    await wait(500);
    // On a machine that stood still the lease has run out, and the engine has left in another way.
    const renewed = await poolRegistry.renewLease(call).catch(() => undefined);
    if (renewed === undefined) return;
  }
  // It leaves as a careful one does: no new legs first, and then out when its last ones have ended.
  await poolRegistry.drainInstance(call);
  while (sim.state().running + sim.state().loading + sim.state().waiting > 0) await wait(50);
  await poolRegistry.deregisterInstance({ instanceId: call.instanceId });
}

/** Disturbs the engines until told to stop; resolves with how often each thing happened when all is as it was. */
export async function disturb(world: ChaosWorld, draw: Draw, isOver: () => boolean): Promise<Record<string, number>> {
  const counts: Record<string, number> = {};
  const disturbed = new Set<Sim>();
  const running = new Set<Promise<void>>();
  let isFileFree = true;
  const track = (name: string, work: Promise<void>, after: () => void) => {
    counts[name] = (counts[name] ?? 0) + 1;
    const run = work.finally(() => {
      after();
      running.delete(run);
    });
    running.add(run);
  };
  const guestsIn = { prefill: false, decode: false };
  while (!isOver()) {
    await wait(draw.int(200, 700));
    for (const sim of await world.distrusted()) {
      if (disturbed.has(sim)) continue;
      disturbed.add(sim);
      // The operator finds it in the log.
      track(
        'distrusted',
        wait(draw.int(500, 4000)).then(() => sim.restart()),
        () => disturbed.delete(sim),
      );
    }
    const role = draw.pick<PoolRole>(['prefill', 'decode']);
    if (draw.chance(0.1) && !guestsIn[role]) {
      guestsIn[role] = true;
      track('added', guest(world, role, draw), () => {
        guestsIn[role] = false;
      });
      continue;
    }
    const pool = world.pools[role];
    const free = pool.filter((sim) => !disturbed.has(sim));
    if (pool.length - free.length >= MOST_DISTURBED) continue;
    const sim = draw.pick(free as [Sim, ...Sim[]]);
    const name = draw.pick(Object.keys(ACTS) as [string, ...string[]]);
    const writesFile = name === 'file without it';
    if (writesFile && !isFileFree) continue;
    if (writesFile) isFileFree = false;
    disturbed.add(sim);
    track(name, ACTS[name]?.(world, sim, draw) ?? Promise.resolve(), () => {
      disturbed.delete(sim);
      if (writesFile) isFileFree = true;
    });
  }
  await Promise.all(running);
  return counts;
}
