import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import type { InstanceView } from './instance-view.ts';

/** Knows for how long each instance has been failing its health checks. */
export class UnhealthyClock implements Disposable {
  readonly #since = new Map<string, number>();
  readonly #now: () => number;
  readonly #unsubscribe: () => void;

  constructor(view: InstanceView, now: () => number) {
    this.#now = now;
    this.#unsubscribe = view.onChange(() => this.#read(view));
    this.#read(view);
  }

  /** Milliseconds; 0 while it passes its checks or is not known. */
  unhealthyForMs(instanceId: string): number {
    const since = this.#since.get(instanceId);
    return since === undefined ? 0 : this.#now() - since;
  }

  [Symbol.dispose](): void {
    this.#unsubscribe();
  }

  #read(view: InstanceView): void {
    const failing = view.snapshot().filter(({ state }) => state === InstanceState.SUSPECT);
    const ids = new Set(failing.map(({ id }) => id));
    for (const id of this.#since.keys()) if (!ids.has(id)) this.#since.delete(id);
    for (const id of ids) if (!this.#since.has(id)) this.#since.set(id, this.#now());
  }
}
