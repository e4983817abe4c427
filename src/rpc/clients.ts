import { Agent as HttpAgent } from 'node:http';
import { Agent as HttpsAgent } from 'node:https';
import { type Client, createClient, type Transport } from '@connectrpc/connect';
import {
  createConnectTransport,
  createGrpcTransport,
  createGrpcWebTransport,
  Http2SessionManager,
} from '@connectrpc/connect-node';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import { RPC_MAX_MESSAGE_BYTES } from './limits.ts';

/** Where another process serves RPC, and how to speak with it. */
export interface RemoteOptions {
  /** Base URL, `http(s)://host[:port][/prefix]`. */
  readonly url: string;
  /** Default `connect`. */
  readonly protocol?: 'connect' | 'grpc' | 'grpc-web';
  /** Default `2`; over http:// that is HTTP/2 without TLS and with prior knowledge. gRPC needs `2`. */
  readonly httpVersion?: '1.1' | '2';
  /** Time after which an attempt to connect fails with UNAVAILABLE, HTTP/2 only. Default 3,000. */
  readonly connectTimeoutMs?: number;
}

/** Clients of the services of another process. Disposing closes the connection, with the calls that are open. */
export interface RemoteServices extends Disposable {
  readonly router: Client<typeof Router>;
  readonly poolRegistry: Client<typeof PoolRegistry>;
  readonly kvCacheStore: Client<typeof KVCacheStore>;
}

/** Makes clients for another process; connects at the first call, and again whenever the connection is lost. */
export function connectRemote(options: RemoteOptions): RemoteServices {
  const { transport, close } = createTransport(options);
  return {
    router: createClient(Router, transport),
    poolRegistry: createClient(PoolRegistry, transport),
    kvCacheStore: createClient(KVCacheStore, transport),
    [Symbol.dispose]: close,
  };
}

function createTransport(options: RemoteOptions): { transport: Transport; close: () => void } {
  const protocol = options.protocol ?? 'connect';
  const common = {
    baseUrl: options.url,
    readMaxBytes: RPC_MAX_MESSAGE_BYTES,
    writeMaxBytes: RPC_MAX_MESSAGE_BYTES,
    // Processes of one deployment are near each other: compressing costs more than it saves.
    acceptCompression: [],
  };
  if (options.httpVersion === '1.1') {
    if (protocol === 'grpc') throw new TypeError('gRPC needs HTTP/2');
    const agent = options.url.startsWith('https:')
      ? new HttpsAgent({ keepAlive: true })
      : new HttpAgent({ keepAlive: true });
    const http1 = { ...common, httpVersion: '1.1' as const, nodeOptions: { agent } };
    const transport = protocol === 'connect' ? createConnectTransport(http1) : createGrpcWebTransport(http1);
    return { transport, close: () => agent.destroy() };
  }
  // The pings find a peer that vanished under an open watch; nothing else would.
  const sessionManager = new Http2SessionManager(options.url, {
    pingIntervalMs: 20_000,
    pingTimeoutMs: 5_000,
    connectTimeoutMs: options.connectTimeoutMs ?? 3_000,
  });
  const http2 = { ...common, httpVersion: '2' as const, sessionManager };
  const transport =
    protocol === 'grpc'
      ? createGrpcTransport({ ...common, sessionManager })
      : protocol === 'connect'
        ? createConnectTransport(http2)
        : createGrpcWebTransport(http2);
  return { transport, close: () => sessionManager.abort() };
}
