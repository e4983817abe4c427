import type { Run } from './sequence.ts';

/** What a {@link RunQueue} asks of its engine. */
export interface RunQueueDeps {
  readonly isDead: () => boolean;
  /** Frees what can be freed before blocks are counted. */
  readonly sweep: () => void;
  /** Begins to keep what a waiting run is to read; returns what ends that. */
  readonly startBeats: (run: Run) => () => void;
}

/** The requests of an engine that wait for a place among those that run, and for blocks; in order of arrival. */
export class RunQueue {
  private readonly waiting: Run[] = [];
  private readonly most: number;
  private readonly deps: RunQueueDeps;
  private pumping = false;
  private active = 0;

  /** @param most requests that run at a time */
  constructor(most: number, deps: RunQueueDeps) {
    this.most = most;
    this.deps = deps;
  }

  /** Resolves when the run has its place and its blocks, or has failed; one that was preempted is the `first`. */
  async admit(run: Run, first = false): Promise<void> {
    run.phase = 'waiting';
    if ((first || this.waiting.length === 0) && this.tryStart(run)) return;
    if (first) this.waiting.unshift(run);
    else this.waiting.push(run);
    const endBeats = this.deps.startBeats(run);
    await new Promise<void>((resolve) => {
      run.wake = resolve;
      if (run.failure !== undefined) resolve();
    });
    run.wake = undefined;
    endBeats();
    const index = this.waiting.indexOf(run);
    if (index >= 0) this.waiting.splice(index, 1);
  }

  /** Gives the place of a run to others, if it has one. */
  leave(run: Run): void {
    if (run.scheduled) this.active -= 1;
    run.scheduled = false;
  }

  /** Starts what fits, in order of arrival. */
  pump(): void {
    // Starting a run looks at the pins, an expired pin frees blocks, and freed blocks pump.
    if (this.pumping) return;
    this.pumping = true;
    try {
      for (let run = this.waiting[0]; run !== undefined; run = this.waiting[0]) {
        if (run.failure === undefined && !this.tryStart(run)) return;
        this.waiting.shift();
        run.wake?.();
      }
    } finally {
      this.pumping = false;
    }
  }

  private tryStart(run: Run): boolean {
    if (this.deps.isDead() || this.active >= this.most) return false;
    this.deps.sweep();
    if (!run.sequence.allocate(run.request.skipCache)) return false;
    this.active += 1;
    run.scheduled = true;
    return true;
  }
}
