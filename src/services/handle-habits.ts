import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import type { LearntOfEngine } from './instance-view.ts';

/** First vLLM version whose streams carry the decode engine's handle (0.32 gives it in whole replies only). */
const FIRST_STREAM_HANDLES = [0, 33] as const;
/** Turns without a handle after which an instance is no longer asked for token ids, but for every so many. */
const PATIENCE = 8;
const LOOK_AGAIN = 64;

/** Of one life of an instance. */
interface Habit {
  /** Turns without a handle since the last one with it. */
  readonly misses: { streamed: number; whole: number };
  /** Whether such a turn ever gave one. */
  readonly gave: { streamed: boolean; whole: boolean };
  kvGroups: number;
  told: LearntOfEngine;
}

type Kind = 'streamed' | 'whole';

/** Learns which decode instances give handles, so that token ids are asked for only where they can be of use. */
export class HandleHabits {
  readonly #habits = new Map<string, Habit>();
  readonly #onLearnt: (instanceId: string, learnt: LearntOfEngine, generation: number) => void;

  /** @param onLearnt hears what is new of the life of an instance */
  constructor(onLearnt: (instanceId: string, learnt: LearntOfEngine, generation: number) => void = () => {}) {
    this.#onLearnt = onLearnt;
  }

  /** Whether a turn on this instance may end with a handle that can be stored. */
  mayGive(decode: Instance, streamed: boolean): boolean {
    if (streamed && !this.streams(decode)) return false;
    const misses = this.#habits.get(lifeOf(decode))?.misses[kindOf(streamed)] ?? 0;
    return misses < PATIENCE || misses % LOOK_AGAIN === 0;
  }

  /** Whether streamed replies of this engine carry a handle; engines of unknown version are given the chance. */
  streams(decode: Instance): boolean {
    if (this.#habits.get(lifeOf(decode))?.gave.streamed === true || decode.engine?.handles === 'all') return true;
    return versionStreams(decode) ?? true;
  }

  /** Takes what a turn that ended well gave; `kvGroups` are those of its handle. */
  note(decode: Instance, streamed: boolean, gaveHandle: boolean, kvGroups = 0): void {
    const life = lifeOf(decode);
    const kind = kindOf(streamed);
    const habit = this.#habits.get(life) ?? {
      misses: { streamed: 0, whole: 0 },
      gave: { streamed: false, whole: false },
      kvGroups: 0,
      told: { handles: '', kvGroups: 0 },
    };
    this.#habits.set(life, habit);
    habit.misses[kind] = gaveHandle ? 0 : habit.misses[kind] + 1;
    habit.gave[kind] ||= gaveHandle;
    if (kvGroups > 0) habit.kvGroups = kvGroups;
    const learnt = { handles: wordOf(habit, decode), kvGroups: habit.kvGroups };
    if (learnt.handles === habit.told.handles && learnt.kvGroups === habit.told.kvGroups) return;
    habit.told = learnt;
    this.#onLearnt(decode.id, learnt, decode.incarnation?.generation ?? 0);
  }
}

function wordOf({ gave, misses }: Habit, decode: Instance): LearntOfEngine['handles'] {
  if (gave.streamed) return 'all';
  // Its streams may still show that they carry them; until then the version says what is to be expected.
  if (gave.whole) return misses.streamed < PATIENCE && versionStreams(decode) === true ? 'all' : 'whole';
  return misses.streamed >= PATIENCE || misses.whole >= PATIENCE ? 'none' : '';
}

function versionStreams(decode: Instance): boolean | undefined {
  const match = /^(\d+)\.(\d+)/.exec(decode.engine?.version ?? '');
  if (match === null) return undefined;
  const [major, minor] = [Number(match[1]), Number(match[2])];
  return major > FIRST_STREAM_HANDLES[0] || minor >= FIRST_STREAM_HANDLES[1];
}

function kindOf(streamed: boolean): Kind {
  return streamed ? 'streamed' : 'whole';
}

function lifeOf(decode: Instance): string {
  return `${decode.id}\n${decode.incarnation?.generation ?? 0}`;
}
