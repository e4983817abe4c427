/** What an engine said of its load, as far as it is not known better here. */
export interface LoadReading {
  /** Requests there that this router had not sent. */
  readonly foreign: number;
  /** Requests that waited there for room, whoever sent them. */
  readonly waiting: number;
  /** Used share of the KV blocks, 0 to 1. */
  readonly kvUsage: number;
  /** When it was read, by the clock of {@link PolicyInput.now}. */
  readonly at: number;
}

/** An instance that may take a leg, with what policies look at. */
export interface Candidate {
  readonly id: string;
  /** Hash of the id, 32 bits. */
  readonly hash: number;
  /** Legs this router has running there. */
  readonly inFlight: number;
  /** Number of the pick by which it had its last turn; 0 before the first. */
  readonly lastPick: number;
  /** Its share of the work relative to the others, above 0. */
  readonly weight: number;
  /** Undefined where its engine tells nothing. */
  readonly reading: LoadReading | undefined;
}

/** The beginning of a prompt, as a hash, with its length in bytes. */
export interface PrefixMark {
  readonly hash: bigint;
  readonly bytes: number;
}

/** What policies may know of a request. */
export interface PolicyRequest {
  /** Names tenant and conversation; empty outside any conversation. */
  readonly session: string;
  /** Beginnings of the prompt, shortest first; empty where nobody has made them. */
  readonly prefix: readonly PrefixMark[];
}

/** Chance and time, handed in so that the same input gives the same order. */
export interface PolicyMoment {
  /** Uniform in [0, 1). */
  readonly random: () => number;
  /** Milliseconds of a clock that only goes forward. */
  readonly now: number;
}

/** What a policy ranks. */
export interface PolicyInput<C extends Candidate> extends PolicyMoment {
  /** Those that passed the filter; the same array until the pools change. */
  readonly candidates: readonly C[];
  /** How many are wanted: one to ask, the others as its fallbacks. */
  readonly count: number;
  readonly request: PolicyRequest;
}

/** Scores the candidates of a leg and picks. One policy object serves one role and may remember what it is told. */
export interface Policy {
  readonly name: string;
  /** The best `count` candidates, each once, best first; fewer only where there are no more. Changes nothing. */
  readonly rank: <C extends Candidate>(input: PolicyInput<C>) => readonly C[];
  /** Told of every plan that is made, unless it is a dry run. */
  readonly learn?: (request: PolicyRequest, candidate: Candidate, now: number) => void;
}

/** Settings of the policies that have some; times in milliseconds, sizes in bytes. */
export interface PolicySettings {
  readonly consistentHash: {
    /** Most legs of an instance, as a multiple of the mean. */
    readonly loadFactor: number;
  };
  readonly cacheAware: {
    /** Least share of a prompt that must be known to an instance for it to be preferred, 0 to 1. */
    readonly cacheThreshold: number;
    /** An instance with more legs than the idlest by this number and by the factor is not preferred. */
    readonly balanceAbsThreshold: number;
    readonly balanceRelThreshold: number;
    /** Bytes of the index. */
    readonly maxBytes: number;
    /** How long a prefix is believed to be cached after its last use; 0 = for ever. */
    readonly maxAgeMs: number;
  };
  readonly stickyLeastLoaded: {
    /** An instance keeps its conversations unless it has this many legs, and twice as many as the idlest. */
    readonly maxLegs: number;
    /** Conversations that are remembered. */
    readonly sessions: number;
  };
}
