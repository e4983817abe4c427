import type { InstanceSpec } from '../../core/instance-spec.ts';
import type { Taint } from '../instance-record.ts';

type Place = Pick<InstanceSpec, 'id' | 'url'>;

/**
 * Processes whose prefix cache cannot be trusted. Whoever leaves and comes back under its id or at its URL is the same
 * process until its start time tells another.
 */
export class Taints {
  readonly #byId = new Map<string, Taint>();
  readonly #byUrl = new Map<string, Taint>();
  readonly #limit: number;

  /** Beyond `limit` the oldest are forgotten. */
  constructor(limit: number) {
    this.#limit = limit;
  }

  of({ id, url }: Place): Taint | undefined {
    return this.#byId.get(id) ?? this.#byUrl.get(url);
  }

  /** Takes what is known of a place now. */
  keep({ id, url }: Place, taint: Taint | undefined): void {
    this.#set(this.#byId, id, taint);
    this.#set(this.#byUrl, url, taint);
  }

  #set(map: Map<string, Taint>, key: string, taint: Taint | undefined): void {
    if (taint === undefined) {
      map.delete(key);
      return;
    }
    map.set(key, taint);
    for (const oldest of map.keys()) {
      if (map.size <= this.#limit) return;
      map.delete(oldest);
    }
  }
}
