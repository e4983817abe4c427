import { readFileSync } from 'node:fs';
import type { CallOptions } from '@connectrpc/connect';
import { connectRemote, type RemoteOptions } from '../../src/rpc/clients.ts';
import { type OpenWorld, ownRequests, type Who } from './store-world.ts';

/** How a store is spoken to. */
export interface ForeignCase {
  readonly name: string;
  readonly open: OpenWorld;
}

type Way = Pick<RemoteOptions, 'protocol' | 'httpVersion'> & { readonly name: string };

const PROTOCOLS: Readonly<Record<string, readonly Way[]>> = {
  connect: [
    { name: 'Connect on HTTP/1.1', protocol: 'connect', httpVersion: '1.1' },
    { name: 'Connect on HTTP/2', protocol: 'connect', httpVersion: '2' },
  ],
  grpc: [{ name: 'gRPC', protocol: 'grpc', httpVersion: '2' }],
  'grpc-web': [{ name: 'gRPC-Web', protocol: 'grpc-web', httpVersion: '1.1' }],
};

/** More than what clocks and timers of two machines differ in within a second. */
const SLACK_MS = 100;

/** The store that the variables CONFORMANCE_… name, through each of its protocols. Throws if they name none. */
export function foreignStore(env: Readonly<Record<string, string | undefined>>): readonly ForeignCase[] {
  const url = env['CONFORMANCE_URL'] ?? '';
  if (url === '') {
    throw new Error('set CONFORMANCE_URL to the store: http(s)://host:port, or unix:/path (docs/kvcachestore.md)');
  }
  const token = env['CONFORMANCE_TOKEN'];
  const tokens: Readonly<Record<Who, string | undefined>> = {
    other: env['CONFORMANCE_OTHER_TOKEN'],
    // A store without tokens lets everybody free blocks.
    operator: env['CONFORMANCE_OPERATOR_TOKEN'] ?? (token === undefined ? '' : undefined),
    router: env['CONFORMANCE_ROUTER_TOKEN'],
    unverified: env['CONFORMANCE_UNVERIFIED_TOKEN'],
  };
  const ca = env['CONFORMANCE_CA'];
  const common = {
    url,
    ...(token === undefined ? {} : { token }),
    ...(ca === undefined ? {} : { tls: { ca: readFileSync(ca, 'utf8') } }),
  };
  const as = (who: Who): CallOptions | undefined => {
    const own = tokens[who];
    if (own === undefined) return undefined;
    return own === '' ? {} : { headers: { authorization: `Bearer ${own}` } };
  };
  return protocolsOf(env['CONFORMANCE_PROTOCOLS']).map(({ name, ...how }) => ({
    name,
    open: async () => {
      const remote = connectRemote({ ...common, ...how });
      return {
        client: remote.kvCacheStore,
        as,
        pass: (ms) => new Promise((resolve) => setTimeout(resolve, ms + SLACK_MS)),
        ...ownRequests(),
        [Symbol.asyncDispose]: async () => remote[Symbol.dispose](),
      };
    },
  }));
}

function protocolsOf(names = Object.keys(PROTOCOLS).join()): readonly Way[] {
  return names.split(',').flatMap((name) => {
    const ways = PROTOCOLS[name.trim()];
    if (ways !== undefined) return ways;
    throw new Error(`CONFORMANCE_PROTOCOLS: "${name}" is none of ${Object.keys(PROTOCOLS).join(', ')}`);
  });
}
