import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect } from 'vitest';
import { type SimPools, startSimPools } from '../../src/sim/pools.ts';
import { startSim } from '../../src/sim/start-sim.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import { type BatonProcess, startBatonProcess } from './baton-process.ts';
import { Conversation, chatWithPlan } from './conversation.ts';
import { type Switchboard, startSwitchboard } from './switchboard.ts';

const ENGINE = { bidirectional: true, blockSize: 16, maxModelLen: 8192, eosEvery: 0, seed: 9 } as const;
/** For what a loaded machine, or the breaker's longest time of 4 s, may delay. */
export const SLOW = { timeout: 60_000, interval: 200 };

/** A front process over simulated engines, and its store in a process of its own, behind a line that can be cut, slow or parted. */
export class SplitStore implements AsyncDisposable {
  readonly line: Switchboard;
  readonly #stack: AsyncDisposableStack;
  readonly #pools: SimPools;
  readonly #newConversation: (id: string) => Conversation;
  readonly #folder: string;
  readonly #conversations: Conversation[] = [];
  #store: BatonProcess | undefined;
  #front: BatonProcess | undefined;

  private constructor(parts: {
    readonly stack: AsyncDisposableStack;
    readonly line: Switchboard;
    readonly pools: SimPools;
    readonly newConversation: (id: string) => Conversation;
    readonly folder: string;
  }) {
    this.#stack = parts.stack;
    this.line = parts.line;
    this.#pools = parts.pools;
    this.#newConversation = parts.newConversation;
    this.#folder = parts.folder;
  }

  /** Starts all of it; `config` is the front's, as YAML. */
  static async start(config: string): Promise<SplitStore> {
    await using opening = new AsyncDisposableStack();
    const pools = opening.use(await startSimPools({ prefill: 2, decode: 2, engine: ENGINE }));
    const plain = await startSim({ ...ENGINE, role: 'both', connector: 'none' });
    opening.defer(() => plain.close());
    const folder = mkdtempSync(join(tmpdir(), 'baton-split-store-'));
    opening.defer(() => rmSync(folder, { recursive: true }));
    const file = join(folder, 'baton.yaml');
    writeFileSync(file, config);
    const line = opening.use(await startSwitchboard());
    const newConversation = (id: string) => new Conversation(id, { stream: true, plain });
    const engines = (['prefill', 'decode'] as const).flatMap((role) =>
      pools[role].flatMap(({ url }) => [`--${role}`, url]),
    );
    const split = new SplitStore({ stack: opening.move(), line, pools, newConversation, folder });
    await split.startStore();
    const roles = ['--roles', 'facade,router,registry', '--kvstore-url', `http://${line.address}`];
    // The turns are short: every handle is worth it.
    roles.push('--reuse-min-saved-tokens', '0');
    split.#front = split.#stack.use(await startBatonProcess([...roles, '--config', file, ...engines]));
    return split;
  }

  get store(): BatonProcess {
    return running(this.#store);
  }

  get front(): BatonProcess {
    return running(this.#front);
  }

  /** Starts a store on what the one before left, and leads the line to it. */
  async startStore(): Promise<void> {
    const snapshot = ['--store-snapshot', join(this.#folder, 'store.snapshot')];
    this.#store = this.#stack.use(await startBatonProcess(['--roles', 'kvstore', ...snapshot]));
    this.line.targets = [this.#store.rpc];
  }

  /** A conversation whose turns {@link settledTurn} counts. */
  newConversation(id: string): Conversation {
    const conversation = this.#newConversation(id);
    this.#conversations.push(conversation);
    return conversation;
  }

  /** A turn that gets a whole and right answer, or the test fails; resolves with what it says of reuse. */
  turn(conversation: Conversation): Promise<string> {
    return conversation.turn((body) => chatWithPlan(this.front.url, body));
  }

  /** A turn; what became of its handle, and of those of the turns before, is known when this resolves. */
  async settledTurn(conversation: Conversation): Promise<string> {
    const outcome = await this.turn(conversation);
    const turns = this.#conversations.reduce((sum, { outcomes }) => sum + outcomes.length, 0);
    await expect.poll(() => this.#settled(), SLOW).toBe(turns);
    return outcome;
  }

  /** Calls that the store did not answer in time. */
  readonly failures = (): Promise<number> => metricOf(this.front, 'baton_store_failures_total');
  /** 1 while the store is not asked. */
  readonly isOpen = (): Promise<number> => metricOf(this.front, 'baton_store_breaker_open');
  /** Turns that went without the store. */
  readonly unavailable = (): Promise<number> =>
    metricOf(this.front, 'baton_reuse_total{outcome="miss_store_unavailable"}');

  /** Turns whose handle the store has got, or is given up. */
  async #settled(): Promise<number> {
    const fates = ['stored', 'store_unavailable'].map((fate) =>
      metricOf(this.front, `baton_decode_handles_total{fate="${fate}"}`),
    );
    return (await Promise.all(fates)).reduce((sum, count) => sum + count);
  }

  /** Ends all of it. Whatever happened to the store: nobody read what was not his, or twice, or too late. */
  async [Symbol.asyncDispose](): Promise<void> {
    const harm = [...this.#pools.prefill, ...this.#pools.decode].map((sim) => {
      const { mismatchedPulls, doubleReads, expiredReads, hung, deathReason } = sim.state();
      return { mismatchedPulls, doubleReads, expiredReads, hung, deathReason };
    });
    // A process that is stopped does not end.
    this.#store?.signal('SIGCONT');
    await this.#stack.disposeAsync();
    const unharmed = { mismatchedPulls: 0, doubleReads: 0, expiredReads: 0, hung: 0, deathReason: null };
    expect(harm).toEqual(harm.map(() => unharmed));
  }
}

function running(process: BatonProcess | undefined): BatonProcess {
  if (process === undefined) throw new Error('not started');
  return process;
}

/** What can happen to a store, and how it ends. */
export interface Fault {
  readonly name: string;
  readonly begin: (split: SplitStore) => Promise<void>;
  readonly end: (split: SplitStore) => Promise<void>;
}

/** Longer than any budget of the tests. */
const SLOW_MS = 1000;

const calm = async ({ line }: SplitStore): Promise<void> => {
  line.delayMs = 0;
};

export const STORE_FAULTS: readonly Fault[] = [
  {
    name: 'killed',
    async begin(split) {
      split.line.targets = [];
      await split.store.end('SIGKILL');
    },
    end: (split) => split.startStore(),
  },
  {
    name: 'paused',
    begin: async ({ store }) => store.signal('SIGSTOP'),
    end: async ({ store }) => store.signal('SIGCONT'),
  },
  {
    name: 'slow',
    async begin({ line }) {
      line.delayMs = SLOW_MS;
    },
    end: calm,
  },
  {
    name: 'parted',
    async begin({ line }) {
      line.delayMs = Number.POSITIVE_INFINITY;
    },
    end: calm,
  },
];
