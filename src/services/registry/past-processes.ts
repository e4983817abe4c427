import type { InstanceSpec } from '../../core/instance-spec.ts';
import type { PastProcess } from '../instance-record.ts';

type Place = Pick<InstanceSpec, 'id' | 'url'>;

/**
 * What was known last of the process at each place: whether its prefix cache can be trusted, and when it was heard of.
 * Whoever leaves and comes back under its id or at its URL is the same process until its start time tells another.
 */
export class PastProcesses {
  readonly #byId = new Map<string, PastProcess>();
  readonly #byUrl = new Map<string, PastProcess>();
  readonly #limit: number;

  /** Beyond `limit` those that were heard of longest ago are forgotten. */
  constructor(limit: number) {
    this.#limit = limit;
  }

  of({ id, url }: Place): PastProcess | undefined {
    const [named, here] = [this.#byId.get(id), this.#byUrl.get(url)];
    const past = here ?? named;
    return past && { ...past, taint: named?.taint ?? here?.taint };
  }

  /** Takes what is known of a place now. */
  keep({ id, url }: Place, past: PastProcess): void {
    this.#set(this.#byId, id, past);
    this.#set(this.#byUrl, url, past);
  }

  #set(map: Map<string, PastProcess>, key: string, past: PastProcess): void {
    map.delete(key);
    map.set(key, past);
    for (const oldest of map.keys()) {
      if (map.size <= this.#limit) return;
      map.delete(oldest);
    }
  }
}
