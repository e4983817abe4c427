import type { KvTransferParams } from '../../gen/baton/v1/kv_transfer_pb.ts';
import { scanObject, spliceObject } from './json-scan.ts';

/**
 * The side-channel address in a handle is the engine's own and is forwarded untouched, with one exception: engines
 * announce "localhost" unless told otherwise, which another host cannot reach. `auto` puts the owner's URL host there
 * when the two legs' hosts differ; `instance` always does (what the example proxy does); `keep` never.
 *
 * @returns the handle's JSON, the same bytes when nothing had to change; undefined when no usable address is known.
 */
export function replaceLoopbackHost(
  raw: Uint8Array,
  params: KvTransferParams,
  rule: 'keep' | 'instance' | 'auto',
  ownerUrl: string,
  readerUrl: string,
): Uint8Array | undefined {
  if (rule === 'keep') return raw;
  const owner = hostOf(ownerUrl);
  if (rule === 'auto') {
    if (!isLoopbackHost(params.remoteHost ?? '')) return raw;
    const reader = hostOf(readerUrl);
    if (owner === reader || (isLoopbackHost(owner) && isLoopbackHost(reader))) return raw;
    if (isLoopbackHost(owner)) return undefined;
  }
  const scan = scanObject(raw);
  if (scan.kind !== 'object') return undefined;
  return spliceObject(raw, scan, { set: new Map([['remote_host', JSON.stringify(owner)]]), drop: new Set() });
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
