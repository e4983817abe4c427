import type { ProcessSpec } from './plan.ts';
import type { LaunchedProcess, LaunchSystem, ProcessEnd, Reaper } from './system.ts';

/** How the wait for a process came out. */
export type Readiness = 'ready' | 'ended' | 'late';

interface Managed {
  readonly spec: ProcessSpec;
  readonly process: LaunchedProcess;
  running: boolean;
}

/** What a supervisor is told. */
export interface SupervisorOptions {
  /** How long each process may take to stop; 0 kills at once. */
  readonly stopTimeoutMs: number;
  /** Called when a process ends that was not asked to. */
  onDeath(spec: ProcessSpec, end: ProcessEnd): void;
}

const POLL_MS = 200;

/**
 * Starts processes, each in a group of its own, and sees to it that no process of a group outlives the group's leader
 * or this supervisor. Dispose it to stop all of them.
 */
export class Supervisor implements AsyncDisposable {
  readonly #system: LaunchSystem;
  readonly #options: SupervisorOptions;
  readonly #reaper: Reaper;
  readonly #managed: Managed[] = [];
  #stopping = false;

  constructor(system: LaunchSystem, options: SupervisorOptions) {
    this.#system = system;
    this.#options = options;
    this.#reaper = system.startReaper(options.stopTimeoutMs);
  }

  /** True once it was told to stop: deaths are not reported any more, and nothing more is started. */
  get isStopping(): boolean {
    return this.#stopping;
  }

  /** Starts a process; its end is reported to `onDeath`. */
  start(spec: ProcessSpec): void {
    if (this.#stopping) return;
    const process = this.#system.start(spec);
    const managed: Managed = { spec, process, running: true };
    this.#managed.push(managed);
    if (process.pid !== undefined) this.#reaper.watch(process.pid);
    void process.ended.then((end) => {
      managed.running = false;
      // The workers of an engine that was killed hold its GPU memory and its ports.
      this.#sweep(process);
      if (!this.#stopping) this.#options.onDeath(spec, end);
    });
  }

  /** The id of a process and of its group; undefined when it was not or could not be started. */
  pidOf(name: string): number | undefined {
    return this.#managed.find(({ spec }) => spec.name === name)?.process.pid;
  }

  isRunning(name: string): boolean {
    return this.#managed.some(({ spec, running }) => spec.name === name && running);
  }

  /** Waits until the process answers, has ended, or `timeoutMs` have passed (0: no limit). */
  async whenReady(spec: ProcessSpec, timeoutMs: number): Promise<Readiness> {
    const limit = timeoutMs === 0 ? Number.POSITIVE_INFINITY : performance.now() + timeoutMs;
    for (;;) {
      if (!this.isRunning(spec.name)) return 'ended';
      // Another program that answers on the port is not the process: one that still runs and answers is.
      if ((await this.#system.isReady(spec.readyUrl)) && this.isRunning(spec.name)) return 'ready';
      if (performance.now() >= limit) return 'late';
      await sleep(POLL_MS);
    }
  }

  /** Kills the group of one process, which is then reported as any other death. */
  async kill(name: string): Promise<void> {
    const found = this.#managed.find(({ spec, running }) => spec.name === name && running);
    if (found?.process.pid === undefined) return;
    this.#system.signalGroup(found.process.pid, 'SIGKILL');
    await found.process.ended;
  }

  /** Stops the proxy, which lets its requests finish, and then the engines; whoever takes too long is killed. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#stopping = true;
    await this.#stopAll(this.#managed.filter(({ spec }) => spec.kind === 'proxy'));
    await this.#stopAll(this.#managed.filter(({ spec }) => spec.kind !== 'proxy'));
    await this.#reaper.close();
  }

  async #stopAll(all: readonly Managed[]): Promise<void> {
    await Promise.all(
      all.map(async (managed) => {
        const { pid, ended } = managed.process;
        // The group of one that has ended was swept then; its number may be somebody else's by this time.
        if (pid === undefined || !managed.running) return;
        if (this.#options.stopTimeoutMs > 0) {
          this.#system.signalGroup(pid, 'SIGTERM');
          await within(ended, this.#options.stopTimeoutMs);
        }
        if (managed.running) this.#system.signalGroup(pid, 'SIGKILL');
        await ended;
        await this.#gone(pid);
      }),
    );
  }

  #sweep({ pid }: LaunchedProcess): void {
    if (pid === undefined) return;
    this.#system.signalGroup(pid, 'SIGKILL');
    this.#reaper.forget(pid);
  }

  /** A killed process takes a moment to leave. */
  async #gone(group: number): Promise<void> {
    const limit = performance.now() + KILL_WAIT_MS;
    while (this.#system.signalGroup(group, 0) && performance.now() < limit) await sleep(20);
  }
}

const KILL_WAIT_MS = 5000;

function sleep(ms: number): Promise<void> {
  return new Promise((resolve) => {
    setTimeout(resolve, ms);
  });
}

async function within(work: Promise<unknown>, ms: number): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  await Promise.race([
    work,
    new Promise((resolve) => {
      timer = setTimeout(resolve, ms);
    }),
  ]);
  clearTimeout(timer);
}
