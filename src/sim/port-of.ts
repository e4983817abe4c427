import type { AddressInfo } from 'node:net';

/** Port of a listener's address; throws if it is not bound to a TCP port. */
export function portOf(address: AddressInfo | string | null): number {
  if (address === null || typeof address === 'string') throw new Error('not a TCP listener');
  return address.port;
}
