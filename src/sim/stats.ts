/** Counters of one engine life. */
export interface EngineStats {
  promptTokens: number;
  localCompute: number;
  localCacheHit: number;
  externalTransfer: number;
  prefixQueries: number;
  prefixHits: number;
  externalQueries: number;
  externalHits: number;
  generationTokens: number;
  readonly finished: Record<'stop' | 'length' | 'abort' | 'error', number>;
  preemptions: number;
  pulls: number;
  pulledTokens: number;
  /** Pulls whose blocks held other tokens than the puller's prompt. */
  mismatchedPulls: number;
  mismatchedTokens: number;
  /** Pulls of blocks that were not kept any more, as the one who read them counts. */
  latePulls: number;
  loadFailures: number;
  /** Reads answered after the lease or TTL ended, and after another read had freed the blocks. */
  expiredReads: number;
  doubleReads: number;
  /** Reads refused because the handle's own expiry had passed. */
  refusedReads: number;
  notificationsAfterExpiry: number;
  heartbeats: number;
  hung: number;
  leakedPins: number;
  leakedBlocks: number;
}

/** All counters at zero. */
export function createStats(): EngineStats {
  return {
    promptTokens: 0,
    localCompute: 0,
    localCacheHit: 0,
    externalTransfer: 0,
    prefixQueries: 0,
    prefixHits: 0,
    externalQueries: 0,
    externalHits: 0,
    generationTokens: 0,
    finished: { stop: 0, length: 0, abort: 0, error: 0 },
    preemptions: 0,
    pulls: 0,
    pulledTokens: 0,
    mismatchedPulls: 0,
    mismatchedTokens: 0,
    latePulls: 0,
    loadFailures: 0,
    expiredReads: 0,
    doubleReads: 0,
    refusedReads: 0,
    notificationsAfterExpiry: 0,
    heartbeats: 0,
    hung: 0,
    leakedPins: 0,
    leakedBlocks: 0,
  };
}

/** The counters of several engines, added up. */
export function sumStats(all: readonly EngineStats[]): EngineStats {
  const sum = createStats();
  for (const { finished, ...counters } of all) {
    for (const [key, value] of Object.entries(counters)) if (isCounter(key)) sum[key] += value;
    for (const reason of FINISHES) sum.finished[reason] += finished[reason];
  }
  return sum;
}

const FINISHES = ['stop', 'length', 'abort', 'error'] as const;

function isCounter(key: string): key is Exclude<keyof EngineStats, 'finished'> {
  return key !== 'finished' && key in createStats();
}
