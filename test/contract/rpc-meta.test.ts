import { create, createFileRegistry, fromBinary } from '@bufbuild/protobuf';
import { type FileDescriptorProto, FileDescriptorProtoSchema, FileDescriptorSetSchema } from '@bufbuild/protobuf/wkt';
import { Code, createClient, type Transport } from '@connectrpc/connect';
import { createConnectTransport, createGrpcTransport } from '@connectrpc/connect-node';
import { afterEach, describe, expect, test } from 'vitest';
import { KVCacheStore } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { Health, HealthCheckResponse_ServingStatus as Status } from '../../gen/grpc/health/v1/health_pb.ts';
import { ServerReflection } from '../../gen/grpc/reflection/v1/reflection_pb.ts';
import { ServerReflection as ServerReflectionAlpha } from '../../gen/grpc/reflection/v1alpha/reflection_pb.ts';
import { createCallerOf } from '../../src/rpc/caller.ts';
import { type RpcListener, startRpcListener } from '../../src/rpc/listener.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

/** A process with a store and nothing else, which wants tokens. */
async function start(): Promise<{ listener: RpcListener; url: string; grpc: Transport }> {
  const rights = { tenant: 't', anyTenant: false, operator: false, unverified: false };
  // SHA-256 of "token".
  const tokens = new Map([['3c469e9d6c5875d37a43f353d4f88e61fcf812c66eee3457465a40b0da4153e0', rights]]);
  const listener = stack.use(
    await startRpcListener({
      host: '127.0.0.1',
      port: 0,
      services: { kvCacheStore: {} },
      callerOf: createCallerOf(() => tokens, false),
      onFault: () => undefined,
    }),
  );
  const url = `http://127.0.0.1:${listener.port}`;
  return { listener, url, grpc: createGrpcTransport({ baseUrl: url }) };
}

describe('health', () => {
  test('is told without a token, in each protocol, for what is served', async () => {
    const { url, grpc } = await start();
    const connect = createConnectTransport({ baseUrl: url, httpVersion: '1.1' });
    for (const client of [grpc, connect].map((transport) => createClient(Health, transport))) {
      expect((await client.check({})).status).toBe(Status.SERVING);
      expect((await client.check({ service: 'baton.v1.KVCacheStore' })).status).toBe(Status.SERVING);
      await expect(client.check({ service: 'baton.v1.Router' })).rejects.toMatchObject({ code: Code.NotFound });
      const { statuses } = await client.list({});
      expect(Object.keys(statuses)).toEqual(['', 'baton.v1.KVCacheStore']);
    }
    const store = createClient(KVCacheStore, grpc);
    await expect(store.getStats({})).rejects.toMatchObject({ code: Code.Unauthenticated });
  });

  test('a watch tells of the drain and ends with it', async () => {
    const { listener, grpc } = await start();
    const client = createClient(Health, grpc);
    const told = async (service: string, ready: () => void) => {
      const statuses: (Status | Code)[] = [];
      try {
        for await (const { status } of client.watch({ service })) {
          statuses.push(status);
          ready();
        }
      } catch (error) {
        expect(error).toMatchObject({ code: Code.Unavailable, rawMessage: 'this process is shutting down' });
      }
      return statuses;
    };
    const ready = [Promise.withResolvers<void>(), Promise.withResolvers<void>()] as const;
    const watches = [
      told('baton.v1.KVCacheStore', ready[0].resolve),
      // Not known, and no end: it may become known.
      told('baton.v1.Router', ready[1].resolve),
    ];
    await Promise.all(ready.map(({ promise }) => promise));
    await listener.close(60_000);
    expect(await Promise.all(watches)).toEqual([[Status.SERVING, Status.NOT_SERVING], [Status.SERVICE_UNKNOWN]]);
  });
});

describe('reflection', () => {
  const token = { headers: { authorization: 'Bearer token' } };

  /** What a generic client does: asks for a symbol, then for each import that it has not got. */
  async function resolve(client: ReflectionClient, symbol: string): Promise<readonly FileDescriptorProto[]> {
    const files = new Map<string, FileDescriptorProto>();
    const wanted: Question[] = [{ messageRequest: { case: 'fileContainingSymbol', value: symbol } }];
    for (let question = wanted.pop(); question !== undefined; question = wanted.pop()) {
      for (const bytes of (await ask(client, [question])).flatMap(filesIn)) {
        const file = fromBinary(FileDescriptorProtoSchema, bytes);
        files.set(file.name, file);
      }
      for (const name of [...files.values()].flatMap(({ dependency }) => dependency)) {
        if (!files.has(name)) wanted.push({ messageRequest: { case: 'fileByFilename', value: name } });
      }
    }
    // The registry wants imports before those who import.
    const ordered = new Set<FileDescriptorProto>();
    const visit = (file: FileDescriptorProto | undefined) => {
      if (file === undefined || ordered.has(file)) return;
      for (const name of file.dependency) visit(files.get(name));
      ordered.add(file);
    };
    for (const file of files.values()) visit(file);
    return [...ordered];
  }

  test.each([ServerReflection, ServerReflectionAlpha])(
    '$typeName lists services and resolves their types',
    async (service) => {
      const { grpc } = await start();
      const client = createClient(service, grpc) as ReflectionClient;
      const [listed] = await ask(client, [{ messageRequest: { case: 'listServices', value: '' } }]);
      const names = listed?.messageResponse.case === 'listServicesResponse' ? listed.messageResponse.value.service : [];
      expect(names.map(({ name }) => name)).toEqual([
        'baton.v1.KVCacheStore',
        'grpc.health.v1.Health',
        'grpc.reflection.v1.ServerReflection',
      ]);
      for (const { name } of names) {
        const registry = createFileRegistry(
          create(FileDescriptorSetSchema, { file: [...(await resolve(client, name))] }),
        );
        expect(registry.getService(name)?.methods.length).toBeGreaterThan(0);
      }
      const registry = createFileRegistry(
        create(FileDescriptorSetSchema, { file: [...(await resolve(client, 'baton.v1.KVCacheStore.TakeEntry'))] }),
      );
      const take = registry.getService('baton.v1.KVCacheStore')?.methods.find(({ name }) => name === 'TakeEntry');
      expect(take?.input.fields.map(({ name }) => name)).toEqual(
        KVCacheStore.method.takeEntry.input.fields.map(({ name }) => name),
      );
    },
  );

  test('one stream: a file is sent once, and what is not there is an error answer', async () => {
    const { grpc } = await start();
    const client = createClient(ServerReflection, grpc);
    const file = { case: 'fileContainingSymbol', value: 'baton.v1.KVCacheStore' } as const;
    const answers = await ask(client, [
      { messageRequest: file },
      { messageRequest: file },
      { messageRequest: { case: 'fileContainingSymbol', value: 'google.rpc.ErrorInfo' } },
      { messageRequest: { case: 'fileContainingSymbol', value: 'baton.v1.Nothing' } },
      { messageRequest: { case: 'fileByFilename', value: 'nothing.proto' } },
      { messageRequest: { case: 'allExtensionNumbersOfType', value: 'baton.v1.EntryKey' } },
      {},
    ]);
    expect(filesIn(answers[0]).length).toBeGreaterThan(3);
    expect(answers.slice(1, 3).map((answer) => filesIn(answer).length)).toEqual([1, 1]);
    expect(answers.slice(3).map(({ messageResponse: { case: kind, value } }) => [kind, errorCodeOf(value)])).toEqual([
      ['errorResponse', Code.NotFound],
      ['errorResponse', Code.NotFound],
      ['allExtensionNumbersResponse', undefined],
      ['errorResponse', Code.InvalidArgument],
    ]);
  });

  test('needs a token where calls do, and a stream that is open ends with the drain', async () => {
    const { listener, grpc } = await start();
    const client = createClient(ServerReflection, grpc);
    const bare = client.serverReflectionInfo(endless())[Symbol.asyncIterator]().next();
    await expect(bare).rejects.toMatchObject({ code: Code.Unauthenticated });
    const open = client.serverReflectionInfo(endless(), token)[Symbol.asyncIterator]();
    await open.next();
    const next = open.next().catch((error: unknown) => error);
    await listener.close(60_000);
    expect(await next).toMatchObject({ code: Code.Unavailable });
  });

  type ReflectionClient = ReturnType<typeof createClient<typeof ServerReflection>>;
  type Question = Parameters<ReflectionClient['serverReflectionInfo']>[0] extends AsyncIterable<infer Q> ? Q : never;
  type Answer = ReturnType<ReflectionClient['serverReflectionInfo']> extends AsyncIterable<infer A> ? A : never;

  async function ask(client: ReflectionClient, questions: readonly Question[]): Promise<readonly Answer[]> {
    const send = async function* () {
      yield* questions;
    };
    const answers: Answer[] = [];
    for await (const answer of client.serverReflectionInfo(send(), token)) answers.push(answer);
    return answers;
  }

  async function* endless(): AsyncGenerator<Question> {
    yield { messageRequest: { case: 'listServices', value: '' } };
    await new Promise(() => undefined);
  }

  function filesIn(answer: Answer | undefined): readonly Uint8Array[] {
    const response = answer?.messageResponse;
    return response?.case === 'fileDescriptorResponse' ? response.value.fileDescriptorProto : [];
  }

  function errorCodeOf(value: Answer['messageResponse']['value']): number | undefined {
    return value !== undefined && 'errorCode' in value ? value.errorCode : undefined;
  }
});
