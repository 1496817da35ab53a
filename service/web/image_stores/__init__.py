"""Where pictures are kept for GET /attention: the model's inputs, never the uploads."""

from service.web.image_stores.memory import AtHand
from service.web.image_stores.redis import RedisImageStore

KeptPictures = AtHand | RedisImageStore
