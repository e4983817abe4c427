import type { FastifyInstance, FastifyReply } from 'fastify';
import { BatonError } from '../core/errors.ts';
import { renderRefusal, toRefusal } from './errors.ts';
import { admit, type OperatorGate } from './operator-gate.ts';

/** What became of an order to read the settings again. */
export type ReloadAnswer =
  /** Keys that have another value now, and keys that would have it after a restart. */
  | {
      readonly kind: 'ok';
      readonly applied: readonly string[];
      readonly restart: readonly string[];
      /** Instances that a source names and the pool does not have. */
      readonly leftOut: readonly { readonly instance: string; readonly source: string; readonly why: string }[];
    }
  /** Nothing was changed. */
  | { readonly kind: 'refused'; readonly problems: readonly string[] }
  | { readonly kind: 'no-file'; readonly message: string };

/** What `POST /-/reload` works with. */
export interface ReloadOptions extends OperatorGate {
  readonly reload: () => Promise<ReloadAnswer>;
}

/** Adds `POST /-/reload`, which is called as Prometheus's is. */
export function addReloadRoute(app: FastifyInstance, options: ReloadOptions): void {
  app.register(async (scope) => {
    scope.removeAllContentTypeParsers();
    scope.addContentTypeParser('*', { parseAs: 'buffer' }, (_request, _body, done) => done(null));
    scope.addHook('onRequest', async (request, reply) => {
      try {
        admit(options, request);
      } catch (error) {
        return refuse(reply, error);
      }
    });
    scope.post('/-/reload', async (_request, reply) => {
      const answer = await options.reload();
      if (answer.kind === 'ok') {
        const { applied, restart, leftOut } = answer;
        return { applied, needs_restart: restart, left_out: leftOut };
      }
      const code = answer.kind === 'refused' ? 500 : 409;
      const problems = answer.kind === 'refused' ? answer.problems : [answer.message];
      return reply.code(code).send({ problems });
    });
  });
}

function refuse(reply: FastifyReply, error: unknown): FastifyReply {
  if (!(error instanceof BatonError)) throw error;
  const { headers, body } = renderRefusal(toRefusal(error));
  return reply.code(error.httpStatus).headers(headers).send(body);
}
