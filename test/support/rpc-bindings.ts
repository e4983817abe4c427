import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Client } from '@connectrpc/connect';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { Router } from '../../gen/baton/v1/router_pb.ts';
import type { RpcFault } from '../../src/rpc/bind.ts';
import { connectRemote, type RemoteOptions } from '../../src/rpc/clients.ts';
import { createDirectClient } from '../../src/rpc/direct-client.ts';
import { startRpcListener } from '../../src/rpc/listener.ts';
import type { RpcServices } from '../../src/rpc/routes.ts';
import { EVERYTHING } from '../../src/services/kv-cache-store.ts';
import { CLIENT_TLS, SERVER_TLS } from './tls.ts';

/** The three services, reached through one binding. */
export interface Bound extends AsyncDisposable {
  readonly router: Client<typeof Router>;
  readonly poolRegistry: Client<typeof PoolRegistry>;
  readonly kvCacheStore: Client<typeof KVCacheStore>;
  readonly faults: readonly RpcFault[];
}

type Door = 'tcp' | 'unix' | 'tls';

/** One way to reach a service. */
export interface Binding {
  readonly name: string;
  readonly open: (services: RpcServices) => Promise<Bound>;
}

/** Every binding that a client of a baton service can have. */
export const BINDINGS: readonly Binding[] = [
  { name: 'direct', open: openDirect },
  remote('Connect on HTTP/1.1', { protocol: 'connect', httpVersion: '1.1' }),
  remote('Connect on HTTP/2', { protocol: 'connect', httpVersion: '2' }),
  remote('gRPC on HTTP/2', { protocol: 'grpc', httpVersion: '2' }),
  remote('gRPC-Web on HTTP/1.1', { protocol: 'grpc-web', httpVersion: '1.1' }),
  remote('gRPC-Web on HTTP/2', { protocol: 'grpc-web', httpVersion: '2' }),
  remote('Connect on HTTP/1.1, unix socket', { protocol: 'connect', httpVersion: '1.1' }, 'unix'),
  remote('Connect on HTTP/2, unix socket', { protocol: 'connect', httpVersion: '2' }, 'unix'),
  remote('Connect on HTTP/1.1, TLS', { protocol: 'connect', httpVersion: '1.1' }, 'tls'),
  remote('gRPC on HTTP/2, TLS', { protocol: 'grpc', httpVersion: '2' }, 'tls'),
];

export async function openDirect(services: RpcServices): Promise<Bound> {
  const faults: RpcFault[] = [];
  const onFault = (fault: RpcFault) => void faults.push(fault);
  return {
    router: createDirectClient(Router, services.router ?? {}, onFault),
    poolRegistry: createDirectClient(PoolRegistry, services.poolRegistry ?? {}, onFault),
    kvCacheStore: createDirectClient(KVCacheStore, services.kvCacheStore ?? {}, onFault),
    faults,
    [Symbol.asyncDispose]: async () => undefined,
  };
}

function remote(name: string, options: Omit<RemoteOptions, 'url'>, door: Door = 'tcp'): Binding {
  return {
    name,
    open: async (services) => {
      const faults: RpcFault[] = [];
      const folder = door === 'unix' ? mkdtempSync(join(tmpdir(), 'baton-')) : '';
      const socketPath = join(folder, 'rpc');
      const listener = await startRpcListener({
        host: '127.0.0.1',
        ...(door === 'unix' ? { port: 'off', socketPath } : { port: 0 }),
        ...(door === 'tls' ? { tls: SERVER_TLS } : {}),
        services,
        callerOf: () => EVERYTHING,
        onFault: (fault) => void faults.push(fault),
      });
      const clients = connectRemote({
        url:
          door === 'unix' ? `unix:${socketPath}` : `${door === 'tls' ? 'https' : 'http'}://127.0.0.1:${listener.port}`,
        ...(door === 'tls' ? { tls: CLIENT_TLS } : {}),
        ...options,
      });
      return {
        ...clients,
        faults,
        [Symbol.asyncDispose]: async () => {
          clients[Symbol.dispose]();
          await listener.close(0);
          if (folder !== '') rmSync(folder, { recursive: true });
        },
      };
    },
  };
}
