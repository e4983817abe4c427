import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { scanObject, spliceObject } from './json-scan.ts';

/** Whose address a reader is told for the owner's side channel (`kv.remote_host`). */
export type RemoteHostRule = 'keep' | 'instance' | 'auto';

/**
 * The side-channel address in a handle is the engine's own and is forwarded untouched, with one exception: engines
 * announce "localhost" unless told otherwise, which another host cannot reach. `auto` puts the owner's URL host there
 * when the two legs' hosts differ; `instance` always does (what the example proxy does); `keep` never.
 *
 * @returns the host to announce; undefined when no address is known that the reader could reach.
 */
export function usableRemoteHost(
  host: string,
  rule: RemoteHostRule,
  ownerUrl: string,
  readerUrl: string,
): string | undefined {
  if (rule === 'keep') return host;
  const owner = hostOf(ownerUrl);
  if (rule === 'instance') return owner;
  if (!isLoopbackHost(host)) return host;
  const reader = hostOf(readerUrl);
  if (owner === reader || (isLoopbackHost(owner) && isLoopbackHost(reader))) return host;
  return isLoopbackHost(owner) ? undefined : owner;
}

/** The raw JSON of a handle with the host by {@link usableRemoteHost}; the same bytes when nothing has to change. */
export function replaceLoopbackHost(
  raw: Uint8Array,
  params: KvTransferParams,
  rule: RemoteHostRule,
  ownerUrl: string,
  readerUrl: string,
): Uint8Array | undefined {
  const announced = params.remoteHost ?? '';
  const host = usableRemoteHost(announced, rule, ownerUrl, readerUrl);
  if (host === undefined || host === announced) return host === undefined ? undefined : raw;
  const scan = scanObject(raw);
  if (scan.kind !== 'object') return undefined;
  return spliceObject(raw, scan, { set: new Map([['remote_host', JSON.stringify(host)]]), drop: new Set() });
}

/** Host of an `http(s)://host[:port]` URL, IPv6 without brackets. */
export function hostOf(url: string): string {
  const authority = url.replace(/^[a-z]+:\/\//i, '').split('/', 1)[0] ?? '';
  const host = authority.startsWith('[') ? authority.slice(1, authority.indexOf(']')) : authority.replace(/:\d+$/, '');
  return host.toLowerCase();
}

/** Whether a host name only reaches the machine it is used on. */
export function isLoopbackHost(host: string): boolean {
  const name = host.toLowerCase().replace(/^\[|\]$/g, '');
  return name === 'localhost' || name === '::1' || name === '0.0.0.0' || /^127\./.test(name);
}
