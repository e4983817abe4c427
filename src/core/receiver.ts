/** Where a decode engine takes KV, as the prefill engine dials it; one port of each kind a tensor-parallel rank. */
export interface Receiver {
  readonly host: string;
  readonly initPorts: readonly number[];
  readonly allocPorts: readonly number[];
  /** Empty: P is told none. */
  readonly queryPorts: readonly number[];
}
