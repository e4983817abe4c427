import { randomUUID } from 'node:crypto';
import { create } from '@bufbuild/protobuf';
import type { Client } from '@connectrpc/connect';
import type { FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { InstanceFilterSchema, type PoolRegistry } from '../../gen/baton/v1/pool_registry_pb.ts';
import { BatonError } from '../core/errors.ts';
import { renderRefusal, toRefusal } from './errors.ts';
import { admit, type OperatorGate } from './operator-gate.ts';
import { readReason, readWorker, workerJson, workersJson } from './worker-json.ts';

/** What the routes of `/workers` work with. */
export interface WorkersOptions extends OperatorGate {
  readonly registry: Client<typeof PoolRegistry>;
  /** Any failure of the registry as baton's own. */
  readonly toBatonError: (error: unknown) => BatonError;
  /** Of workers that are added without one. */
  readonly connector: string;
}

const PAGE = 1000;

/** Adds the routes by which operators see and change the pools, in the shape that the peers' routers have. */
export function addWorkersRoutes(app: FastifyInstance, options: WorkersOptions): void {
  const { registry, connector } = options;
  const answer = (reply: FastifyReply, error: unknown) => {
    const own = plain(options.toBatonError(error));
    const { headers, body } = renderRefusal(toRefusal(own));
    return reply.code(own.httpStatus).headers(headers).send(body);
  };
  app.register(async (scope) => {
    scope.removeAllContentTypeParsers();
    scope.addContentTypeParser('*', { parseAs: 'string' }, (_request, body, done) => done(null, body));
    scope.setErrorHandler((error, _request, reply) => answer(reply, error));
    scope.addHook('onRequest', async (request) => admit(options, request));

    scope.get('/workers', async () => workersJson(await listAll(registry)));
    scope.get('/workers/:id', async (request) => {
      const { instance } = await registry.getInstance({ instanceId: idOf(request) });
      return instance === undefined ? {} : workerJson(instance);
    });
    scope.post('/workers', async (request, reply) => {
      const key = request.headers['idempotency-key'];
      const wanted = readWorker(bodyOf(request), typeof key === 'string' ? key : randomUUID(), connector);
      const { instance } = await registry.registerInstance(wanted);
      const id = instance?.id ?? '';
      reply.code(202).header('location', `/workers/${encodeURIComponent(id)}`);
      return { status: 'accepted', worker_id: id, ...(instance === undefined ? {} : { worker: workerJson(instance) }) };
    });
    scope.delete('/workers/:id', async (request) => {
      const instanceId = idOf(request);
      const { removed } = await registry.deregisterInstance({ instanceId, reason: readReason(bodyOf(request)) });
      if (!removed) throw new BatonError({ reason: 'INSTANCE_NOT_FOUND', message: 'there is no such worker' });
      return { status: 'removed', worker_id: instanceId };
    });
    for (const [action, call] of [
      ['drain', registry.drainInstance],
      ['resume', registry.resumeInstance],
    ] as const) {
      scope.post(`/workers/:id/${action}`, async (request) => {
        const { instance } = await call({ instanceId: idOf(request), reason: readReason(bodyOf(request)) });
        return instance === undefined ? {} : workerJson(instance);
      });
    }
  });
}

async function listAll(registry: Client<typeof PoolRegistry>) {
  const states = [
    InstanceState.STARTING,
    InstanceState.READY,
    InstanceState.SUSPECT,
    InstanceState.DRAINING,
    InstanceState.GONE,
  ];
  const filter = create(InstanceFilterSchema, { states });
  const all = [];
  let pageToken = '';
  do {
    const page = await registry.listInstances({ filter, pageSize: PAGE, pageToken });
    all.push(...page.instances);
    pageToken = page.nextPageToken;
  } while (pageToken !== '');
  return all;
}

function idOf({ params }: FastifyRequest): string {
  return typeof params === 'object' && params !== null && 'id' in params ? String(params.id) : '';
}

/** The members of a JSON body; none without a body. */
function bodyOf({ body }: FastifyRequest): Readonly<Record<string, unknown>> {
  if (typeof body !== 'string' || body.trim() === '') return {};
  let value: unknown;
  try {
    value = JSON.parse(body);
  } catch (error) {
    throw new BatonError({ reason: 'BODY_INVALID_JSON', message: 'the body is no JSON' }, { cause: error });
  }
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new BatonError({ reason: 'BODY_NOT_OBJECT', message: 'the body is no JSON object' });
  }
  return { ...value };
}

/** The fields of the body are those of the instance. */
function plain(error: BatonError): BatonError {
  if (error.param?.startsWith('instance.') !== true) return error;
  const { reason, metadata } = error;
  const strip = (text: string) => text.replace(/^instance\.(kv\.)?/, '');
  return new BatonError(
    { reason, message: strip(error.message), param: strip(error.param), metadata },
    { cause: error },
  );
}
