/** Blocks that an engine keeps for a reader; times in milliseconds of one clock. */
export interface Lease {
  /** When it ends, unless the reader extends it. */
  readonly endsAt: number;
  /** Its length: vLLM's `kv_lease_duration`. */
  readonly ms: number;
}

/**
 * When a lease may be over, as far as is known of a reader that was last heard of at `heardAt`. While a request waits in
 * its queue a vLLM engine sends a heartbeat each sixth of the lease, which makes it last two thirds of its length from then.
 */
function leaseMayEndAt({ endsAt, ms }: Lease, heardAt: number): number {
  return Math.max(endsAt, heardAt - ms / 6 + (ms * 2) / 3);
}

/**
 * How long after its first sign of life a reader that goes on may have done nothing yet: by then it has sent a heartbeat, read,
 * or heard that it was given up.
 */
export function settleMs({ ms }: Pick<Lease, 'ms'>): number {
  return ms / 6;
}

/** The last moment at which a reader that is silent since `heardAt` can go on and still read in time. */
export function readableUntil(lease: Lease, heardAt: number): number {
  return leaseMayEndAt(lease, heardAt) - settleMs(lease);
}

/** Whether a reader that was silent for a time may have read when the lease was over. */
export function mayReadLate(
  lease: Lease,
  silence: { readonly from: number; readonly until?: number } | undefined,
  now: number,
): boolean {
  return silence !== undefined && (silence.until ?? now) > readableUntil(lease, silence.from);
}
