import type { IncomingMessage } from 'node:http';
import { BlockList } from 'node:net';
import { BatonError } from '../core/errors.ts';
import { isOfProxies } from '../core/request-headers.ts';
import { isTenantName } from '../core/tenant.ts';

/** Which peers may speak for others, and how they name the tenant. */
export interface ProxyRules {
  /** Lower case; undefined: nobody names tenants. */
  readonly header: string | undefined;
  readonly trusted: BlockList;
}

/** Makes the list of trusted peers. */
export function trustedPeers(
  networks: readonly { readonly address: string; readonly bits: number; readonly family: 'ipv4' | 'ipv6' }[],
): BlockList {
  const list = new BlockList();
  for (const { address, bits, family } of networks) list.addSubnet(address, bits, family);
  return list;
}

/**
 * Takes what counts from trusted proxies alone out of a request's headers, from any other peer all of it, and gives the
 * tenant that a trusted one names. Who the peer is says the connection, never a header.
 *
 * @throws BatonError where a trusted proxy names something that is no tenant
 */
export function takeProxyHeaders({ header, trusted }: ProxyRules, request: IncomingMessage): string | undefined {
  const { headers, socket } = request;
  const isTrusted = isListed(trusted, socket.remoteAddress);
  if (!isTrusted) for (const name of Object.keys(headers)) if (isOfProxies(name)) delete headers[name];
  const named = header === undefined ? undefined : headers[header];
  if (header === undefined || named === undefined) return undefined;
  delete headers[header];
  if (!isTrusted) return undefined;
  if (typeof named === 'string' && isTenantName(named)) return named;
  throw new BatonError({ reason: 'INVALID_ARGUMENT', message: `The header ${header} names no tenant.` });
}

function isListed(list: BlockList, address: string | undefined): boolean {
  if (address === undefined) return false;
  const v4 = /^::ffff:(\d+\.\d+\.\d+\.\d+)$/i.exec(address)?.[1];
  if (v4 !== undefined) return list.check(v4);
  return list.check(address, address.includes(':') ? 'ipv6' : 'ipv4');
}
