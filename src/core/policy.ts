/** An instance that may take a leg, with what policies look at. */
export interface Candidate {
  readonly id: string;
  /** Legs this router has running there. */
  readonly inFlight: number;
}

/** What a policy ranks with; the caller owns the counter. */
export interface PolicyInput {
  readonly candidates: readonly Candidate[];
  /** Counts the picks of one pool, from 0. */
  readonly turn: number;
}

/** Orders the candidates of a leg, best first: the first one is tried, the others are its fallbacks. */
export interface Policy {
  readonly name: string;
  readonly rank: (input: PolicyInput) => readonly Candidate[];
}
