import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import type { SimOptions } from './options.ts';
import { type Sim, startSim } from './start-sim.ts';

/** What a process with simulated engines runs: how many of each role. */
export interface SimPoolsOptions {
  readonly prefill: number;
  readonly decode: number;
  /** Options that all of them share. */
  readonly engine?: Omit<SimOptions, 'role' | 'port' | 'sidePort'>;
}

/** Running simulated engines on free loopback ports; disposing ends them. */
export interface SimPools extends AsyncDisposable {
  readonly prefill: readonly Sim[];
  readonly decode: readonly Sim[];
}

/** Starts the engines of both pools. */
export async function startSimPools(options: SimPoolsOptions): Promise<SimPools> {
  await using stack = new AsyncDisposableStack();
  const startPool = (role: 'prefill' | 'decode', count: number) =>
    Promise.all(
      Array.from({ length: count }, async () => {
        const sim = await startSim({ ...options.engine, role });
        stack.defer(() => sim.close());
        return sim;
      }),
    );
  const prefill = await startPool('prefill', options.prefill);
  const decode = await startPool('decode', options.decode);
  const engines = stack.move();
  return { prefill, decode, [Symbol.asyncDispose]: () => engines.disposeAsync() };
}
