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
export function leaseMayEndAt({ endsAt, ms }: Lease, heardAt: number): number {
  return Math.max(endsAt, heardAt - ms / 6 + (ms * 2) / 3);
}

/** Whether a reader that was silent for a time may have read when the lease was over. */
export function mayReadLate(
  lease: Lease,
  silence: { readonly from: number; readonly until?: number } | undefined,
  now: number,
): boolean {
  return silence !== undefined && (silence.until ?? now) > leaseMayEndAt(lease, silence.from);
}
