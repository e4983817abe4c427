import type { Instance } from '../../gen/baton/v1/instance_pb.ts';

/** First vLLM version whose streams carry the decode engine's handle (0.32 gives it in whole replies only). */
const FIRST_STREAM_HANDLES = [0, 33] as const;
/** Turns without a handle after which an instance is no longer asked for token ids, but for every so many. */
const PATIENCE = 8;
const LOOK_AGAIN = 64;

/** Learns which decode instances give handles, so that token ids are asked for only where they can be of use. */
export class HandleHabits {
  readonly #misses = new Map<string, number>();

  /** Whether a turn on this instance may end with a handle that can be stored. */
  mayGive(decode: Instance, streamed: boolean): boolean {
    if (streamed && !streamsHandles(decode)) return false;
    const misses = this.#misses.get(habitKey(decode, streamed)) ?? 0;
    return misses < PATIENCE || misses % LOOK_AGAIN === 0;
  }

  /** Takes what a turn that ended well gave. */
  note(decode: Instance, streamed: boolean, gaveHandle: boolean): void {
    const key = habitKey(decode, streamed);
    if (gaveHandle) this.#misses.delete(key);
    else this.#misses.set(key, (this.#misses.get(key) ?? 0) + 1);
  }
}

/** Whether streamed replies of this engine carry a handle; engines of unknown version are given the chance. */
export function streamsHandles(decode: Instance): boolean {
  const match = /^(\d+)\.(\d+)/.exec(decode.engine?.version ?? '');
  if (match === null) return true;
  const [major, minor] = [Number(match[1]), Number(match[2])];
  return major > FIRST_STREAM_HANDLES[0] || minor >= FIRST_STREAM_HANDLES[1];
}

function habitKey(decode: Instance, streamed: boolean): string {
  return `${decode.id}\n${decode.incarnation?.generation ?? 0}\n${streamed}`;
}
