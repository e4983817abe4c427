import type { SimClock } from './clock.ts';

/** Stops a simulated process and lets it go on (SIGSTOP, SIGCONT): time passes, and what came meanwhile is done then. */
export class PauseSwitch {
  private held: (() => void)[] | undefined;

  get isPaused(): boolean {
    return this.held !== undefined;
  }

  pause(): void {
    this.held ??= [];
  }

  resume(): void {
    const held = this.held ?? [];
    this.held = undefined;
    for (const act of held) act();
  }

  /** Acts now, or when the process goes on. */
  run(act: () => void): void {
    if (this.held === undefined) act();
    else this.held.push(act);
  }

  /** Resolves when the process runs. */
  passed(): Promise<void> {
    return new Promise((resolve) => this.run(resolve));
  }

  /** A clock whose timers do nothing while the process is stopped. */
  over(clock: SimClock): SimClock {
    const cancelled = new WeakSet<object>();
    const inner = new WeakMap<object, unknown>();
    return {
      now: () => clock.now(),
      setTimeout: (callback, ms) => {
        const handle = {};
        const fire = (): void => {
          if (!cancelled.has(handle)) callback();
        };
        inner.set(
          handle,
          clock.setTimeout(() => this.run(fire), ms),
        );
        return handle;
      },
      clearTimeout: (handle) => {
        if (typeof handle !== 'object' || handle === null) return;
        cancelled.add(handle);
        clock.clearTimeout(inner.get(handle));
      },
    };
  }
}
