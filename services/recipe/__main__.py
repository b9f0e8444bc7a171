"""Start the recipe."""

from services.chassis.service import run
from services.recipe.config import RecipeSettings
from services.recipe.server import build

if __name__ == "__main__":
    run(RecipeSettings, build)
