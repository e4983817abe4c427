import type { FastifyServerOptions } from 'fastify';

function refuse(): never {
  throw new Error('routes of baton have no JSON schemas');
}

/** For servers whose routes have no JSON schemas: fastify then does without its compilers, which take a while to load. */
export const NO_SCHEMAS = {
  compilersFactory: { buildValidator: refuse, buildSerializer: refuse },
} satisfies FastifyServerOptions['schemaController'];
